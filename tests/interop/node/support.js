'use strict';

// What every program here needs: checks that print, waiting with a limit, clients with the address of the broker, an inbox.
//
// A program hands its story to `run`. It prints a line for each check; the first that fails ends it with a sentence and
// exit code 1.

const fs = require('fs');
const { Consumer, Message, Producer } = require('ali-ons');

// How long to wait for something that must happen. Nothing is asserted about how soon it does.
const LIMIT_MS = 60_000;

const route = process.argv[2];
let clients = 0;

async function run(story) {
  try {
    await story();
  } catch (error) {
    console.log(`FAILED: ${error.message}\n${error.stack}`);
    process.exit(1);
  }
  process.exit(0); // the client leaves timers behind
}

// -- checks -----------------------------------------------------------------------------------------------------------

function ok(sentence) {
  console.log(`ok: ${sentence.split('\n')[0]}`);
}

function check(holds, sentence) {
  if (!holds) {
    throw new Error(sentence);
  }
}

function sleep(ms) {
  return new Promise(resolve => setTimeout(resolve, ms));
}

async function until(what, holds) {
  const end = Date.now() + LIMIT_MS;
  while (!await holds()) {
    check(Date.now() < end, `waited ${LIMIT_MS} ms in vain: ${what}`);
    await sleep(5);
  }
}

// -- clients ----------------------------------------------------------------------------------------------------------

const log = (...words) => fs.appendFileSync('ali-ons.log', `${words.map(word => word && word.stack || word).join(' ')}\n`);

// The package has a producer of its own inside, whose errors it prints.
console.error = log;

// Each is a client of its own: by default, those of one process share an id. The package wants a client for HTTP, and has
// a use for it only where the address of the broker is to be looked up.
function options(own) {
  return {
    nameSrv: route,
    instanceName: `${process.pid}-${++clients}`,
    httpclient: { request() { throw new Error('the address of the broker is known'); } },
    logger: { debug() {}, info() {}, warn: log, error: log },
    accessKey: process.env.INTEROP_ACCESS_KEY, // without one, nothing is signed
    secretKey: process.env.INTEROP_SECRET_KEY,
    ...own,
  };
}

async function startProducer() {
  const producer = new Producer(options({ producerGroup: 'node-producer' }));
  producer.on('error', log);
  await producer.ready();
  return producer;
}

// `decide` is told of each message after the inbox; what it returns or throws is the listener's answer.
async function startConsumer(group, topic, tags, inbox, decide = () => undefined, own = {}) {
  const consumer = new Consumer(options({
    consumerGroup: group,
    consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET',
    pullTimeDelayMillsWhenException: 500,
    ...own,
  }));
  consumer.on('error', log);
  await consumer.ready();
  consumer.subscribe(topic, tags, async message => {
    inbox.add(message);
    return decide(message);
  });
  return consumer;
}

// -- messages ---------------------------------------------------------------------------------------------------------

function message(topic, text, { tag, keys, level, atMs, properties } = {}) {
  const made = tag ? new Message(topic, tag, text) : new Message(topic, text);
  if (keys) {
    made.keys = keys;
  }
  if (level) {
    made.delayTimeLevel = level;
  }
  if (atMs) {
    made.setStartDeliverTime(atMs);
  }
  Object.assign(made.properties, properties);
  return made;
}

// Everything that arrived, in order, each as it was at that moment.
class Inbox {
  constructor() {
    this.arrivals = [];
  }

  add({ body, topic, tags, keys, msgId, queueId, reconsumeTimes, properties }) {
    const text = body.toString();
    this.arrivals.push({ text, topic, tags, keys, msgId, queueId, reconsumeTimes, properties, atMs: Date.now() });
  }

  get byText() {
    const found = new Map();
    for (const arrival of this.arrivals) {
      if (!found.has(arrival.text)) {
        found.set(arrival.text, arrival);
      }
    }
    return found;
  }

  // Waits for so many, and makes sure that there is not one more.
  async await(count, what) {
    await until(`${count} of ${what}`, () => this.arrivals.length >= count);
    check(this.arrivals.length === count, `${what}: ${this.arrivals.length} arrived, expected ${count}`);
    return this.arrivals;
  }
}

module.exports = { Inbox, check, message, ok, run, sleep, startConsumer, startProducer, until };
