// Checks that print, waiting with a limit, and clients.

'use strict';

const { ConsumeResult, Producer, PushConsumer, SimpleConsumer } = require('rocketmq-client-nodejs');

// To wait for something that must happen; nothing is asserted about how soon it does. A message that was on its way to a
// push consumer when the broker was killed comes again after a minute.
const LIMIT_MS = 100_000;
const INVISIBLE_MS = 60_000; // longer than any check takes
const AWAIT_MS = 5_000;
const CA_FILE = process.env.INTEROP_CA_FILE; // whom gRPC's library trusts stands in a variable of its own
const USER = process.env.INTEROP_ACCESS_KEY;

const consumers = [];

function ok(sentence) {
  console.log(`ok: ${sentence.split('\n')[0]}`);
}

function check(holds, sentence) {
  if (!holds) {
    throw new Error(sentence);
  }
}

function same(expected, found, what) {
  const [one, two] = [JSON.stringify(expected), JSON.stringify(found)];
  check(one === two, `${what}: expected ${one}, found ${two}`);
}

const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));

async function until(what, holds) {
  const end = Date.now() + LIMIT_MS;
  while (!(await holds())) {
    check(Date.now() < end, `waited ${LIMIT_MS} ms in vain: ${what}`);
    await sleep(5);
  }
}

// The broker's code is in the error, or in its sentence.
async function refused(code, what, attempt) {
  try {
    await attempt();
  } catch (error) {
    check(`${error.code} ${error.message}`.includes(code), `${what} was refused otherwise: ${error.stack}`);
    ok(`${what} is refused: ${error.message}`);
    return;
  }
  check(false, `${what} was not refused`);
}

function configured(secret = process.env.INTEROP_SECRET_KEY) {
  const way = { endpoints: process.argv[2], namespace: '', sslEnabled: !!CA_FILE };
  return USER ? { ...way, sessionCredentials: { accessKey: USER, accessSecret: secret } } : way;
}

async function produce(topic, options = {}, secret = undefined) {
  const producer = new Producer({ ...configured(secret), topics: [topic], ...options });
  await producer.startup();
  return producer;
}

// Puts what it gets into the inbox, then decides. It ends with the process: it has asked the broker for messages, and
// ending it waits for the answer.
async function push(consumerGroup, topic, inbox, { tags = '*', isDone = () => true } = {}) {
  const consumer = new PushConsumer({
    ...configured(), consumerGroup, subscriptions: new Map([[topic, tags]]), longPollingTimeout: AWAIT_MS,
    messageListener: {
      async consume(message) {
        const arrival = inbox.add(message);
        return isDone(arrival) ? ConsumeResult.SUCCESS : ConsumeResult.FAILURE;
      },
    },
  });
  await consumer.startup();
  consumers.push(consumer);
}

async function simple(consumerGroup, topic) {
  const subscriptions = new Map([[topic, '*']]);
  const consumer = new SimpleConsumer({ ...configured(), consumerGroup, subscriptions, awaitDuration: AWAIT_MS });
  await consumer.startup();
  return consumer;
}

// Receives until there are that many; acknowledges nothing.
async function receive(consumer, count) {
  const received = [];
  await until(`${count} messages`, async () => {
    received.push(...await consumer.receive(32, INVISIBLE_MS));
    return received.length >= count;
  });
  same(count, received.length, 'messages received');
  return received;
}

// The one of a group, acknowledged. There may be no such topic before the first one.
async function deadLetter(group) {
  let reader;
  await until(`a topic for dead letters of ${group}`, async () => {
    reader = await simple(`${group}-letters`, `%DLQ%${group}`).catch(() => null);
    return reader;
  });
  const [letter] = await receive(reader, 1);
  await reader.ack(letter);
  return letter;
}

function message(topic, text, more = {}) {
  return { topic, body: Buffer.from(text), ...more };
}

// Everything that a push consumer got, in order, and when.
class Inbox {
  all = [];

  add(got) {
    const arrival = { text: got.body.toString(), message: got, attempt: got.deliveryAttempt, atMs: Date.now() };
    this.all.push(arrival);
    return arrival;
  }

  of(text) {
    return this.all.filter(arrival => arrival.text === text);
  }

  // Waits for that many, and makes sure that there is not one more.
  async wait(count, what) {
    await until(`${count} of ${what}`, () => this.all.length >= count);
    same(count, this.all.length, what);
    return this.all;
  }
}

module.exports = {
  Inbox, USER, check, deadLetter, message, ok, produce, push, receive, refused, same, simple, sleep, until,
};
