'use strict';

// One story per group: each fails in its own way. The package leaves the delay to the broker: level 3, 4, ..., which are
// 1 s, 2 s, 3 s here.

const { Consumer } = require('ali-ons');
const { Inbox, check, message, ok, run, startConsumer, startProducer } = require('./support');

run(async () => {
  const producer = await startProducer();
  await thrown(producer);
  await returned(producer);
  await dead(producer);
});

async function thrown(producer) {
  const inbox = new Inbox();
  const { msgId } = await producer.send(message('thrown', 'hard work', { tag: 'paid', keys: [ 'order-7' ] }));
  await startConsumer('thrown-group', 'thrown', 'paid', inbox, ({ reconsumeTimes }) => {
    if (reconsumeTimes < 2) {
      throw new Error('the listener\'s own fault');
    }
  });
  const arrivals = await inbox.await(3, 'attempts');
  arrivals.forEach(({ text, topic, keys, reconsumeTimes, properties }, i) => {
    check(reconsumeTimes === i, `attempt ${i} says that it came back ${reconsumeTimes} times`);
    check(text === 'hard work' && topic === 'thrown' && keys === 'order-7', `a retry is ${JSON.stringify(arrivals[i])}`);
    check(i === 0 || properties.ORIGIN_MESSAGE_ID === msgId, `a retry is of ${properties.ORIGIN_MESSAGE_ID}, not ${msgId}`);
  });
  const [ first, second ] = [ 1, 2 ].map(i => arrivals[i].atMs - arrivals[i - 1].atMs);
  check(first >= 1_000 && second >= 2_000, `retries came after ${first} and ${second} ms, expected 1 and 2 s`);
  ok(`a message whose listener threw twice came again after ${first} and ${second} ms`);
}

async function returned(producer) {
  const inbox = new Inbox();
  await producer.send(message('returned', 'work'));
  await startConsumer('returned-group', 'returned', '*', inbox, () => Consumer.ACTION_RETRY);
  const arrivals = await inbox.await(2, 'attempts');
  check(arrivals[1].reconsumeTimes === 1, `the retry says that it came back ${arrivals[1].reconsumeTimes} times`);
  ok('ACTION_RETRY makes a retry');
}

async function dead(producer) {
  const inbox = new Inbox();
  await producer.send(message('dead', 'hopeless', { keys: [ 'order-8' ] }));
  const fail = () => { throw new Error('hopeless'); };
  await startConsumer('dead-group', 'dead', '*', inbox, fail, { maxReconsumeTimes: 1 });
  const letters = new Inbox();
  // There is no such topic before the first letter: it looks often.
  await startConsumer('dead-group-reader', '%DLQ%dead-group', '*', letters, undefined,
    { pollNameServerInteval: 250, rebalanceInterval: 250 });
  const [ letter ] = await letters.await(1, 'dead letters');
  check(inbox.arrivals.length === 2, `${inbox.arrivals.length} attempts with one retry allowed`);
  check(letter.text === 'hopeless' && letter.keys === 'order-8' && letter.properties.RETRY_TOPIC === 'dead',
    `the dead letter is ${JSON.stringify(letter)}`);
  ok('after one retry a message is a dead letter, read from %DLQ%dead-group');
}
