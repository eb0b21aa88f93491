'use strict';

// A broker that is killed and started again under a producer and a consumer. Whoever runs this program does it when
// "restart please" is printed, and writes a line.

const readline = require('readline');
const { Inbox, check, message, ok, run, sleep, startConsumer, startProducer, until } = require('./support');

const RESTARTS = 2;
const BETWEEN = 100; // acknowledged messages between two restarts

const dueMs = new Map(); // of acknowledged messages, by text
let failures = 0;
let ended = false;

run(async () => {
  const inbox = new Inbox();
  const producer = await startProducer();
  await startConsumer('restart-group', 'restart', '*', inbox, undefined, { parallelConsumeLimit: 32 });
  const sending = sendUntilEnded(producer);
  const input = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  for (let i = 1; i <= RESTARTS; i++) {
    const enough = dueMs.size + BETWEEN;
    await until(`messages before restart ${i}`, () => dueMs.size >= enough && inbox.arrivals.length);
    console.log('restart please');
    check(!(await input.next()).done, 'nobody restarts the broker');
    const upAtMs = Date.now();
    const before = inbox.arrivals.length;
    await until('the consumer reads again', () => inbox.arrivals.length > before + 10);
    ok(`restart ${i}: the consumer reads again ${Date.now() - upAtMs} ms after the broker is up`);
  }
  ended = true;
  await sending;
  await judge(inbox);
});

// One after the other: at once, or up to five seconds later, so that some are due while the broker is down.
async function sendUntilEnded(producer) {
  for (let i = 0; !ended; i++) {
    const delayMs = i % 2 ? 50 * (i % 100) : 0;
    const atMs = Date.now() + delayMs;
    try {
      await producer.send(message('restart', `kept-${i}`, { atMs: delayMs ? atMs : 0 }));
      dueMs.set(`kept-${i}`, atMs);
    } catch (error) {
      failures++;
    }
    await sleep(5);
  }
}

async function judge(inbox) {
  await until(`all ${dueMs.size} acknowledged messages`, () => {
    const arrivals = inbox.byText;
    return [ ...dueMs.keys() ].every(text => arrivals.has(text));
  });
  for (const { text, atMs } of inbox.arrivals) {
    check(!dueMs.has(text) || atMs >= dueMs.get(text), `${text} arrived before it was due, after a restart`);
  }
  const again = inbox.arrivals.length - inbox.byText.size;
  ok(`${dueMs.size} acknowledged messages arrived, none early, none lost; ${again} came twice, ` +
    `${failures} sends failed while the broker was down`);
}
