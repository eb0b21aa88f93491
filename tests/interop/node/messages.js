'use strict';

// What is not delayed: bodies, keys, tags, the members of a group, broadcasting, a topic made by the client.

const { Inbox, check, message, ok, run, startConsumer, startProducer, until } = require('./support');

run(async () => {
  const producer = await startProducer();
  await created(producer);
  await plain(producer);
  await tagged(producer);
  await shared(producer);
  await broadcast(producer);
});

// The package has this request, and no public way to it.
async function created(producer) {
  const client = producer._mqClient;
  const { brokerDatas } = await client.getTopicRouteInfoFromNameServer('TBW102', 3_000);
  await client.createTopic(brokerDatas[0].brokerAddrs[0], 'TBW102', {
    topicName: 'created', readQueueNums: 3, writeQueueNums: 3, perm: 6, topicFilterType: 'SINGLE_TAG', topicSysFlag: 0,
    order: false,
  }, 3_000);
  const { queueDatas } = await client.getTopicRouteInfoFromNameServer('created', 3_000);
  check(queueDatas[0].writeQueueNums === 3, `the topic has ${JSON.stringify(queueDatas)}`);
  ok('a topic is made with three queues');
}

async function plain(producer) {
  const inbox = new Inbox();
  await startConsumer('plain-group', 'plain', '*', inbox); // before there is a topic
  for (let i = 0; i < 100; i++) {
    const one = message('plain', `body-${i}`, { tag: 'paid', keys: [ `key-${i}`, 'grün' ], properties: { colour: 'rötlich' } });
    const { sendStatus, msgId } = await producer.send(one);
    check(sendStatus === 'SEND_OK' && msgId, `a send was answered with ${sendStatus} ${msgId}`);
  }
  for (const { text, topic, tags, keys, properties } of await inbox.await(100, 'messages with keys')) {
    check(keys === `key-${text.split('-')[1]} grün`, `the keys of ${text} are ${keys}`);
    check(tags === 'paid' && topic === 'plain' && properties.colour === 'rötlich', `${text} has ${JSON.stringify(properties)}`);
  }
  check(inbox.byText.size === 100, 'a message came twice');
  ok('100 messages arrived once each, with body, keys, tag and property');
  await producer.send(message('plain', 'x'.repeat(20_000))); // compressed by the client
  await inbox.await(101, 'messages');
  check(inbox.byText.has('x'.repeat(20_000)), 'the large message is another one');
  ok('a large message arrived');
}

async function tagged(producer) {
  const inbox = new Inbox();
  const sendAll = async when => {
    for (const tag of [ 'a', 'b', 'c', 'd' ]) {
      await producer.send(message('tagged', `${when} ${tag}`, { tag }));
    }
  };
  await sendAll('early');
  await startConsumer('tagged-group', 'tagged', 'a || c', inbox);
  await inbox.await(2, 'early messages of two tags');
  await sendAll('late');
  for (const { tags } of await inbox.await(4, 'messages of two tags')) {
    check([ 'a', 'c' ].includes(tags), `a message with tag ${tags} arrived`);
  }
  ok('a consumer of a || c gets those tags and no others');
}

async function shared(producer) {
  const inboxes = [ new Inbox(), new Inbox() ];
  for (const inbox of inboxes) {
    await startConsumer('shared-group', 'shared', '*', inbox, undefined, { rebalanceInterval: 500 });
  }
  let sent = 0;
  const sendOne = () => producer.send(message('shared', `shared-${sent++}`));
  await until('both members of a group have work', async () => {
    await sendOne();
    return inboxes.every(inbox => inbox.arrivals.length);
  });
  for (let i = 0; i < 100; i++) {
    await sendOne();
  }
  await until('all shared messages', () => new Set(inboxes.flatMap(inbox => [ ...inbox.byText.keys() ])).size === sent);
  const [ first, second ] = inboxes.map(inbox => inbox.arrivals.length);
  ok(`two members of a group share ${sent} messages: ${first} and ${second}`);
}

async function broadcast(producer) {
  const inboxes = [ new Inbox(), new Inbox() ];
  for (const inbox of inboxes) {
    await startConsumer('broadcast-group', 'broadcast', '*', inbox, undefined, { isBroadcast: true });
  }
  for (let i = 0; i < 10; i++) {
    await producer.send(message('broadcast', `broadcast-${i}`));
  }
  for (const inbox of inboxes) {
    await inbox.await(10, 'broadcast messages');
    check(inbox.byText.size === 10, 'a broadcast message is missing');
  }
  ok('both broadcasting consumers get all 10 messages');
}
