// RocketMQ's Node client for gRPC against a broker: one part after the other. The argument is the broker's address. A
// line is printed for each check; the first that fails ends it with a sentence and exit code 1.

'use strict';

const readline = require('node:readline');
const {
  Inbox, USER, check, deadLetter, message, ok, produce, push, receive, refused, same, simple, sleep, until,
} = require('./support');
const { TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const YEAR_MS = 365 * 24 * 3_600_000;

// Sends without delay; a push consumer of some tags, and a simple consumer of all.
async function messages() {
  const topic = 'messages', each = 20;
  const inbox = new Inbox(), producer = await produce(topic), reader = await simple('messages-simple', topic);
  await push('messages-push', topic, inbox, { tags: 'a || c' });
  const ids = {};
  for (let i = 0; i < each; i++) {
    ids[`single-${i}`] = (await producer.send(tagged(topic, 'single', i))).messageId;
  }
  const texts = Array.from({ length: each }, (_, i) => i);
  await Promise.all(texts.map(async i => {
    ids[`together-${i}`] = (await producer.send(tagged(topic, 'together', i))).messageId;
  }));
  for (const got of await receive(reader, 2 * each)) {
    const text = got.body.toString(), number = Number(text.split('-')[1]);
    const expected = [ids[text], topic, 'abcd'[number % 4], ['grün', `key-${text}`], [['colour', 'rötlich']], 1];
    const { messageId, tag, keys, properties, deliveryAttempt } = got;
    same(expected, [messageId, got.topic, tag, [...keys].sort(), [...properties], deliveryAttempt], text);
    await reader.ack(got);
    delete ids[text];
  }
  same({}, ids, 'messages that were not received');
  ok(`${2 * each} messages, half of them sent at the same time, arrived once each, with id, body, tag, keys and `
    + 'property, and were acknowledged');
  for (const arrival of await inbox.wait(each, 'messages of two tags')) {
    check('ac'.includes(arrival.message.tag), `a message with tag ${arrival.message.tag} arrived`);
  }
  ok('a push consumer of a || c gets those tags and no others');
  await again(producer, reader);
  if (USER) {
    const wrong = await produce(topic, { topics: [] }, 'another'); // with topics it would not say why it gets no routes
    await refused(40100, 'a wrong secret', () => wrong.recallMessage(topic, 'never'));
  }
}

function tagged(topic, name, number) {
  const text = `${name}-${number}`, properties = new Map([['colour', 'rötlich']]);
  return message(topic, text, { tag: 'abcd'[number % 4], keys: ['grün', `key-${text}`], properties });
}

async function again(producer, reader) {
  await producer.send(message('messages', 'again'));
  const [first] = await receive(reader, 1);
  await reader.changeInvisibleDuration(first, 1_000);
  const [second] = await receive(reader, 1);
  same([first.messageId, 2], [second.messageId, second.deliveryAttempt], 'the message that came again');
  await refused(40013, 'an expired handle', () => reader.ack(first));
  await reader.ack(second);
  ok('a message comes again after the invisible time that its consumer asked for');
}

// Messages for later, one of which is recalled.
async function delays() {
  const topic = 'delays', inbox = new Inbox(), producer = await produce(topic);
  await push('delays-push', topic, inbox);
  const due = (text, atMs) => message(topic, text, { deliveryTimestamp: new Date(atMs) });
  const doomed = await producer.send(due('recalled', Date.now() + 2_000));
  const dueMs = {};
  for (const delayMs of [-5_000, 700, 1_234, 2_345, 2_500]) {
    const text = `in ${delayMs} ms`;
    dueMs[text] = Date.now() + delayMs;
    await producer.send(due(text, dueMs[text]));
  }
  const recalled = await producer.recallMessage(topic, doomed.recallHandle);
  same(doomed.messageId, recalled.messageId, 'the id of the recalled message');
  await refused(40012, 'a delay of twenty years', () => producer.send(due('never', Date.now() + 20 * YEAR_MS)));
  for (const { text, atMs } of await inbox.wait(Object.keys(dueMs).length, 'delayed messages')) {
    check(atMs >= dueMs[text], `${text} arrived ${dueMs[text] - atMs} ms early`);
    ok(`${text}: arrived ${atMs - dueMs[text]} ms after due`);
  }
  ok('a message that was recalled stayed away');
}

// Message groups: each comes in order, past a message that fails. This client does not know the server's policy, and
// takes every failure of an ordered message for the last.
async function order() {
  const topic = 'order', each = 10, customers = ['anna', 'bert', 'carl'];
  const inbox = new Inbox(), producer = await produce(topic);
  for (let i = 0; i < each; i++) {
    for (const messageGroup of customers) {
      await producer.send(message(topic, `${messageGroup}-${i}`, { messageGroup }));
    }
  }
  await push('order-push', topic, inbox, { isDone: arrival => arrival.text !== 'carl-4' });
  const arrivals = await inbox.wait(3 * each, 'ordered messages');
  for (const customer of customers) {
    const mine = arrivals.filter(arrival => arrival.message.messageGroup === customer);
    same(Array.from({ length: each }, (_, i) => `${customer}-${i}`), mine.map(arrival => arrival.text), customer);
  }
  ok('three message groups came in order');
  same('carl-4', (await deadLetter('order-push')).body.toString(), 'the dead letter');
  ok('a message that fails is a dead letter, then its followers come');
}

// Transactions that end, and others about which the broker has to ask.
async function transactions() {
  const topic = 'transactions', inbox = new Inbox(), asked = [];
  const checker = {
    async check(got) {
      const text = got.body.toString(), isFirst = !asked.includes(text);
      asked.push(text);
      if (text === 'asked twice' && isFirst) {
        return TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED;
      }
      return text.startsWith('asked') ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
    },
  };
  const producer = await produce(topic, { checker });
  await push('transactions-push', topic, inbox);
  const half = async text => {
    const transaction = producer.beginTransaction();
    await producer.send(message(topic, text), transaction);
    return transaction;
  };
  await half('forgotten');
  await half('asked once');
  await half('asked twice');
  await (await half('rolled back')).rollback();
  await (await half('committed')).commit();
  await until('the committed message', () => inbox.of('committed').length);
  ok('a committed message arrived');
  await until('the broker asks about all three', () => new Set(asked).size === 3);
  const arrivals = await inbox.wait(3, 'messages of transactions');
  same(['asked once', 'asked twice', 'committed'], arrivals.map(arrival => arrival.text).sort(), 'what arrived');
  same(['asked once', 'asked twice', 'forgotten'], [...new Set(asked)].sort(), 'what the broker asked about');
  ok('the broker asked about open transactions, one of them twice; those rolled back stayed away');
}

// A listener that fails. This client does not know the server's policy, and asks for its message at once; the group
// says how often it comes.
async function retries() {
  const topic = 'retries', inbox = new Inbox(), producer = await produce(topic);
  const isDone = arrival => arrival.text === 'hard work' && arrival.attempt === 3;
  await push('retries-push', topic, inbox, { isDone });
  await producer.send(message(topic, 'hard work'));
  const hopeless = await producer.send(message(topic, 'hopeless', { keys: ['order-8'] }));
  for (const text of ['hard work', 'hopeless']) {
    await until(`three attempts of ${text}`, () => inbox.of(text).length === 3);
    same([1, 2, 3], inbox.of(text).map(arrival => arrival.attempt), `attempts of ${text}`);
  }
  const [first, second, third] = inbox.of('hard work').map(arrival => arrival.atMs);
  ok(`a message that failed twice came again after ${second - first} and ${third - second} ms`);
  const letter = await deadLetter('retries-push');
  const expected = ['hopeless', ['order-8'], hopeless.messageId];
  same(expected, [letter.body.toString(), letter.keys, letter.messageId], 'the dead letter');
  same(6, inbox.all.length, 'attempts of two messages');
  ok('after three attempts a message is a dead letter, received from %DLQ%retries-push');
}

// The broker is killed and started again under a producer and a consumer, by the process that reads our output.
async function restart() {
  const topic = 'restart', inbox = new Inbox(), producer = await produce(topic), dueMs = {};
  let failures = 0, ended = false;
  await push('restart-push', topic, inbox);
  const sending = (async () => {
    for (let i = 0; !ended; i++) {
      // At once, or up to two seconds later, so that some are due while the broker is down.
      const text = `kept-${i}`, delayMs = i % 2 ? 20 * (i % 100) : 0, atMs = Date.now() + delayMs;
      try {
        await producer.send(message(topic, text, delayMs ? { deliveryTimestamp: new Date(atMs) } : {}));
        dueMs[text] = atMs;
      } catch (error) {
        failures++;
      }
      await sleep(5);
    }
  })();
  await until('messages before the restart', () => Object.keys(dueMs).length >= 100 && inbox.all.length);
  console.log('restart please');
  const input = readline.createInterface({ input: process.stdin });
  const line = await new Promise(resolve => input.once('line', resolve).once('close', () => resolve(null)));
  check(line !== null, 'nobody restarts the broker');
  const upAtMs = Date.now(), before = inbox.all.length;
  await until('the consumer reads again', () => inbox.all.length > before + 10);
  ok(`the consumer reads again ${Date.now() - upAtMs} ms after the broker is up`);
  ended = true;
  await sending;
  const count = Object.keys(dueMs).length;
  const texts = () => new Set(inbox.all.map(arrival => arrival.text));
  await until(`all ${count} acknowledged messages`, () => {
    const arrived = texts();
    return Object.keys(dueMs).every(text => arrived.has(text));
  });
  for (const { text, atMs } of inbox.all) {
    check(atMs >= (dueMs[text] ?? 0), `${text} arrived before it was due, after a restart`);
  }
  ok(`${count} acknowledged messages arrived, none early, none lost; ${inbox.all.length - texts().size} came twice, `
    + `${failures} sends failed while the broker was down`);
}

async function main() {
  for (const part of [messages, delays, order, transactions, retries, restart]) {
    await part();
  }
}

main().then(() => process.exit(0), error => {
  console.log(`FAILED: ${error.message}`);
  console.log(error.stack);
  process.exit(1);
});
