'use strict';

// Every way to ask for a delay; each arrival is compared with the time of sending. Levels are 1 s, 2 s, 1 s, ...

const { Inbox, check, message, ok, run, startConsumer, startProducer } = require('./support');

const dueMs = new Map(); // by text

run(async () => {
  const producer = await startProducer();
  const inbox = new Inbox();
  await startConsumer('delays-group', 'delays', '*', inbox, undefined, { parallelConsumeLimit: 32 });
  await producer.send(message('delays', 'hello'));
  await inbox.await(1, 'the first message'); // from here on the consumer is no longer what messages wait for

  const send = (text, atMs, how) => {
    dueMs.set(text, atMs);
    return producer.send(message('delays', text, how));
  };
  const after = (text, delayMs, how) => send(text, Date.now() + delayMs, how);
  const at = (text, delayMs, how) => {
    const atMs = Date.now() + delayMs;
    return send(text, atMs, how(atMs));
  };
  await after('delayTimeLevel = 1', 1_000, { level: 1 });
  await after('delayTimeLevel = 2', 2_000, { level: 2 });
  await after('TIMER_DELAY_SEC = 2', 2_000, { properties: { TIMER_DELAY_SEC: '2' } });
  await after('TIMER_DELAY_MS = 1234', 1_234, { properties: { TIMER_DELAY_MS: '1234' } });
  await at('TIMER_DELIVER_MS in 2567 ms', 2_567, atMs => ({ properties: { TIMER_DELIVER_MS: atMs } }));
  await at('setStartDeliverTime in 1765 ms', 1_765, atMs => ({ atMs }));
  await at('setStartDeliverTime 5 s ago', -5_000, atMs => ({ atMs }));
  for (let i = 0; i < 200; i++) {
    await at(`spread-${i}`, 2_000 + 5 * i, atMs => ({ atMs }));
  }
  await refused(producer, 'setStartDeliverTime("tomorrow")', { atMs: 'tomorrow' });
  await refused(producer, 'setStartDeliverTime in 20 years', { atMs: Date.now() + 20 * 365 * 86_400_000 });

  await inbox.await(1 + dueMs.size, 'delayed messages');
  judge(inbox.byText);
});

async function refused(producer, what, how) {
  let refusal;
  try {
    await producer.send(message('delays', 'never', how));
  } catch (error) {
    refusal = error;
  }
  check(refusal, `${what} was not refused`);
  check(refusal.code === 13, `${what} was refused otherwise: ${refusal.code} ${refusal.message}`);
  ok(`${what} is refused with 13: ${refusal.message}`);
}

function judge(arrivals) {
  let spread = 0;
  let latestMs = 0;
  for (const [ text, atMs ] of dueMs) {
    check(arrivals.has(text), `${text} did not arrive`);
    const lateMs = arrivals.get(text).atMs - atMs;
    check(lateMs >= 0, `${text} arrived ${-lateMs} ms before it was due`);
    if (text.startsWith('spread-')) {
      spread++;
      latestMs = Math.max(latestMs, lateMs);
    } else {
      ok(`${text}: arrived ${lateMs} ms after due`);
    }
  }
  ok(`${spread} instants by setStartDeliverTime: none early, the latest by ${latestMs} ms`);
}
