//! RocketMQ's Rust client for gRPC against a broker: one part after the other. The argument is the broker's address. A
//! line is printed for each check; the first that fails ends it with a sentence and exit code 1.
//!
//! This client has no push consumer, no recall and no change of the invisible time. It sends delivery times in whole
//! seconds.

mod support;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rocketmq::model::message::MessageView;
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use support::*;

#[tokio::main]
async fn main() {
    start();
    messages().await;
    delays().await;
    order().await;
    transactions().await;
    again().await;
    restart().await;
    std::process::exit(0);
}

/// Sends without delay, one by one and several at once; a consumer of some tags, and one of all.
async fn messages() {
    let (topic, each) = ("messages", 20);
    let producer = produce(topic).await;
    let mut ids = BTreeMap::new();
    for number in 0..each {
        let text = format!("single-{}", number);
        let receipt = must(producer.send(tagged(topic, &text, number)).await, "a send");
        ids.insert(text, receipt.message_id().to_string());
    }
    let members = (0..each).map(|number| tagged(topic, &format!("member-{}", number), number));
    must(producer.batch_send(members.collect()).await, "a batch");

    let reader = consume("messages-simple", topic).await;
    let mut found = BTreeSet::new();
    for got in receive(&reader, topic, "*", 2 * each).await {
        let text = text_of(&got);
        let number: usize = text.split('-').nth(1).unwrap().parse().unwrap();
        check(got.topic() == topic && got.delivery_attempt() == 1, &format!("{} is {:?}", text, got));
        check(got.tag() == Some(tag(number)), &format!("the tag of {} is {:?}", text, got.tag()));
        check(got.keys() == [format!("key-{}", text), "grün".to_string()], &format!("{} has {:?}", text, got.keys()));
        let properties = HashMap::from([("colour".to_string(), "rötlich".to_string())]);
        check(got.properties() == &properties, &format!("{} has {:?}", text, got.properties()));
        if let Some(id) = ids.get(&text) {
            check(id == got.message_id(), &format!("the id of {} is {}", text, got.message_id()));
        }
        must(reader.ack(&got).await, "an acknowledgement");
        found.insert(text);
    }
    check(found.len() == 2 * each, &format!("{} different messages were received", found.len()));
    ok(&format!(
        "{} messages, half of them sent as one batch, arrived once each, with body, tag, keys and property, and were \
         acknowledged",
        2 * each
    ));
    let filtered = consume("messages-push", topic).await;
    for got in receive(&filtered, topic, "a || c", each).await {
        check(["a", "c"].contains(&got.tag().unwrap()), &format!("a message with tag {:?} arrived", got.tag()));
        must(filtered.ack(&got).await, "an acknowledgement");
    }
    ok("a consumer of a || c gets those tags and no others");
    if is_signed() {
        let refusal = try_produce(topic, "another").await.err().expect("a wrong secret was not refused");
        check(refusal.contains("Unauthenticated"), &format!("a wrong secret was refused otherwise: {}", refusal));
        ok(&format!("a wrong secret is refused: {}", refusal));
    }
}

fn tagged(topic: &str, text: &str, number: usize) -> impl rocketmq::model::message::Message {
    message(topic, text)
        .set_tag(tag(number))
        .set_keys(vec![format!("key-{}", text), "grün".to_string()])
        .set_properties(HashMap::from([("colour", "rötlich")]))
        .build()
        .unwrap()
}

fn tag(number: usize) -> &'static str {
    ["a", "b", "c", "d"][number % 4]
}

/// Messages for later.
async fn delays() {
    let topic = "delays";
    let (producer, reader) = (produce(topic).await, consume("delays-simple", topic).await);
    let begin_s = now_ms() / 1_000;
    let seconds = [-5, 1, 2, 4];
    for after_s in seconds {
        must(producer.send(due(topic, &after_s.to_string(), begin_s + after_s)).await, "a send");
    }
    let far = producer.send(due(topic, "never", begin_s + 20 * 365 * 24 * 3_600)).await;
    let refusal = far.err().expect("a delay of twenty years was not refused").to_string();
    check(refusal.contains("ILLEGAL_DELIVERY_TIME"), &refusal);
    ok(&format!("a delay of twenty years is refused: {}", refusal));
    for _ in seconds {
        let got = &receive(&reader, topic, "*", 1).await[0];
        let at_ms = now_ms();
        must(reader.ack(got).await, "an acknowledgement");
        let after_s: i64 = text_of(got).parse().unwrap();
        let late_ms = at_ms - 1_000 * (begin_s + after_s);
        check(late_ms >= 0, &format!("the message for second {} arrived {} ms early", after_s, -late_ms));
        ok(&format!("due at second {}: arrived {} ms later", after_s, late_ms));
    }
}

/// Message groups: each comes in order.
async fn order() {
    let (topic, each, customers) = ("order", 10, ["anna", "bert", "carl"]);
    let (producer, reader) = (produce(topic).await, consume("order-push", topic).await);
    for number in 0..each {
        for customer in customers {
            let one = message(topic, &format!("{}-{}", customer, number)).set_message_group(customer);
            must(producer.send(one.build().unwrap()).await, "a send");
        }
    }
    let mut found: HashMap<String, Vec<String>> = HashMap::new();
    let mut count = 0;
    while count < customers.len() * each {
        for got in receive_some(&reader, topic, "*", Duration::from_secs(60)).await {
            must(reader.ack(&got).await, "an acknowledgement");
            found.entry(got.message_group().unwrap().to_string()).or_default().push(text_of(&got));
            count += 1;
        }
    }
    for customer in customers {
        let expected: Vec<String> = (0..each).map(|number| format!("{}-{}", customer, number)).collect();
        check(found[customer] == expected, &format!("messages of {} came as {:?}", customer, found[customer]));
    }
    ok("three message groups came in order");
}

/// Transactions that end, and others about which the broker has to ask.
async fn transactions() {
    let topic = "transactions";
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let known = asked.clone();
    let checker = move |_: String, got: MessageView| {
        let (text, mut known) = (text_of(&got), known.lock().unwrap());
        let is_first = !known.contains(&text);
        known.push(text.clone());
        match text.as_str() {
            "asked twice" if is_first => TransactionResolution::UNKNOWN,
            "asked once" | "asked twice" => TransactionResolution::COMMIT,
            _ => TransactionResolution::ROLLBACK,
        }
    };
    let producer = produce_transactions(topic, Box::new(checker)).await;
    let reader = consume("transactions-simple", topic).await;
    for text in ["forgotten", "asked once", "asked twice"] {
        must(producer.send_transaction_message(half(topic, text)).await, "a half message");
    }
    let rolled_back = must(producer.send_transaction_message(half(topic, "rolled back")).await, "a half message");
    must(rolled_back.rollback().await, "a rollback");
    let committed = must(producer.send_transaction_message(half(topic, "committed")).await, "a half message");
    must(committed.commit().await, "a commit");
    let mut arrived = BTreeSet::new();
    for got in receive(&reader, topic, "*", 3).await {
        must(reader.ack(&got).await, "an acknowledgement");
        arrived.insert(text_of(&got));
    }
    let expected = ["asked once", "asked twice", "committed"].map(String::from);
    check(arrived == BTreeSet::from(expected), &format!("{:?} arrived", arrived));
    until("the broker asks about all three", || {
        let about: BTreeSet<String> = asked.lock().unwrap().iter().cloned().collect();
        about == BTreeSet::from(["asked once", "asked twice", "forgotten"].map(String::from))
    })
    .await;
    ok("the broker asked about open transactions, one of them twice; those rolled back stayed away");
}

/// A message that is not acknowledged.
async fn again() {
    let topic = "retries";
    let (producer, reader) = (produce(topic).await, consume("retries-simple", topic).await);
    must(producer.send(message(topic, "again").build().unwrap()).await, "a send");
    let mut attempts = Vec::new();
    while attempts.len() < 2 {
        for got in receive_some(&reader, topic, "*", Duration::from_secs(10)).await {
            attempts.push(got.delivery_attempt());
            if attempts.len() == 2 {
                must(reader.ack(&got).await, "an acknowledgement");
            }
        }
    }
    check(attempts == [1, 2], &format!("attempts say {:?}", attempts));
    ok("a message that is not acknowledged comes again after its invisible time");
}

/// The broker is killed and started again under a producer and a consumer, by the process that reads our output.
async fn restart() {
    let topic = "restart";
    let arrivals: Arc<Mutex<Vec<(String, i64)>>> = Arc::default();
    let due_ms: Arc<Mutex<HashMap<String, i64>>> = Arc::default(); // of acknowledged messages
    let ended = Arc::new(AtomicBool::new(false));
    let reader = consume("restart-simple", topic).await;
    let inbox = arrivals.clone();
    tokio::spawn(async move {
        loop {
            for got in receive_some(&reader, topic, "*", Duration::from_secs(10)).await {
                inbox.lock().unwrap().push((text_of(&got), now_ms()));
                let _ = reader.ack(&got).await; // one that is lost while the broker is down makes the message come again
            }
        }
    });
    let (sent, is_over) = (due_ms.clone(), ended.clone());
    let producer = produce(topic).await;
    let sending = tokio::spawn(async move {
        let mut failures = 0;
        for number in 0.. {
            if is_over.load(Ordering::SeqCst) {
                break;
            }
            // At once, or in whole seconds, so that some are due while the broker is down.
            let text = format!("kept-{}", number);
            let due_s = if number % 2 == 0 { 0 } else { now_ms() / 1_000 + number % 3 };
            let one = message(topic, &text);
            let one = if due_s > 0 { one.set_delivery_timestamp(due_s) } else { one };
            match producer.send(one.build().unwrap()).await {
                Ok(_) => drop(sent.lock().unwrap().insert(text, 1_000 * due_s)),
                Err(_) => failures += 1,
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        failures
    });
    until("messages before the restart", || {
        due_ms.lock().unwrap().len() >= 100 && !arrivals.lock().unwrap().is_empty()
    })
    .await;
    ask_for_restart();
    let (up_at_ms, before) = (now_ms(), arrivals.lock().unwrap().len());
    until("the consumer reads again", || arrivals.lock().unwrap().len() > before + 10).await;
    ok(&format!("the consumer reads again {} ms after the broker is up", now_ms() - up_at_ms));
    ended.store(true, Ordering::SeqCst);
    let failures = sending.await.unwrap();
    let due_ms = due_ms.lock().unwrap().clone();
    let texts = || -> BTreeSet<String> { arrivals.lock().unwrap().iter().map(|(text, _)| text.clone()).collect() };
    until(&format!("all {} acknowledged messages", due_ms.len()), || {
        let arrived = texts();
        due_ms.keys().all(|text| arrived.contains(text))
    })
    .await;
    let arrivals = arrivals.lock().unwrap().clone();
    for (text, at_ms) in &arrivals {
        let is_early = due_ms.get(text).map_or(false, |due_ms| at_ms < due_ms);
        check(!is_early, &format!("{} arrived before it was due, after a restart", text));
    }
    let different: BTreeSet<&String> = arrivals.iter().map(|(text, _)| text).collect();
    ok(&format!(
        "{} acknowledged messages arrived, none early, none lost; {} came twice, {} sends failed while the broker was down",
        due_ms.len(),
        arrivals.len() - different.len(),
        failures
    ));
}
