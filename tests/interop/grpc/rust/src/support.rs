//! Checks that print, waiting with a limit, and clients.

use std::env;
use std::fmt::Display;
use std::fs;
use std::io;
use std::panic;
use std::process;
use std::time::{Duration, Instant, SystemTime};

use rocketmq::conf::{ClientOption, LoggingFormat, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::TransactionChecker;
use rocketmq::{Producer, SimpleConsumer};

const LIMIT: Duration = Duration::from_secs(60); // to wait for something that must happen
const WAIT: Duration = Duration::from_secs(6); // how long a receive may take: the broker waits a little less

/// Has a check that fails end the program, from whatever task it is made.
pub fn start() {
    fs::create_dir_all("logs").unwrap(); // the client writes there, and does not make it
    panic::set_hook(Box::new(|problem| {
        let sentence = problem.payload().downcast_ref::<String>().cloned();
        println!("FAILED: {}", sentence.unwrap_or_else(|| problem.to_string()));
        println!("{}", problem);
        process::exit(1);
    }));
}

pub fn ok(sentence: &str) {
    println!("ok: {}", sentence.lines().next().unwrap_or(""));
}

pub fn check(holds: bool, sentence: &str) {
    if !holds {
        panic!("{}", sentence);
    }
}

pub fn must<T, E: Display>(result: Result<T, E>, what: &str) -> T {
    result.unwrap_or_else(|error| panic!("{}: {}", what, error))
}

pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        check(begin.elapsed() < LIMIT, &format!("waited {:?} in vain: {}", LIMIT, what));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn now_ms() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as i64
}

pub fn ask_for_restart() {
    println!("restart please");
    let mut line = String::new();
    check(io::stdin().read_line(&mut line).unwrap() > 0, "nobody restarts the broker");
}

pub fn is_signed() -> bool {
    env::var("INTEROP_ACCESS_KEY").is_ok()
}

fn configured(secret: &str) -> ClientOption {
    let mut option = ClientOption::default();
    option.set_access_url(env::args().nth(1).unwrap());
    option.set_long_polling_timeout(WAIT);
    if let Ok(user) = env::var("INTEROP_ACCESS_KEY") {
        option.set_access_key(user);
        option.set_secret_key(secret);
    }
    option
}

fn own_secret() -> String {
    env::var("INTEROP_SECRET_KEY").unwrap_or_default()
}

fn of_topic(topic: &str) -> ProducerOption {
    let mut option = ProducerOption::default();
    option.set_logging_format(LoggingFormat::Json);
    option.set_topics(vec![topic]);
    option
}

pub async fn try_produce(topic: &str, secret: &str) -> Result<Producer, String> {
    let mut producer = must(Producer::new(of_topic(topic), configured(secret)), "a producer");
    producer.start().await.map_err(|error| error.to_string())?;
    Ok(producer)
}

pub async fn produce(topic: &str) -> Producer {
    must(try_produce(topic, &own_secret()).await, "a producer starts")
}

pub async fn produce_transactions(topic: &str, checker: Box<TransactionChecker>) -> Producer {
    let made = Producer::new_transaction_producer(of_topic(topic), configured(&own_secret()), checker);
    let mut producer = must(made, "a producer of transactions");
    must(producer.start().await, "a producer of transactions starts");
    producer
}

pub async fn consume(group: &str, topic: &str) -> SimpleConsumer {
    let mut option = SimpleConsumerOption::default();
    option.set_logging_format(LoggingFormat::Json);
    option.set_consumer_group(group);
    option.set_topics(vec![topic]);
    let mut consumer = must(SimpleConsumer::new(option, configured(&own_secret())), "a consumer");
    must(consumer.start().await, "a consumer starts");
    consumer
}

/// Receives once. Without messages the answer is an error to this client.
pub async fn receive_some(
    consumer: &SimpleConsumer,
    topic: &str,
    tags: &str,
    invisible: Duration,
) -> Vec<MessageView> {
    let filter = FilterExpression::new(FilterType::Tag, tags);
    match consumer.receive_with(topic, &filter, 32, invisible).await {
        Ok(received) => received,
        Err(_) => {
            tokio::time::sleep(Duration::from_millis(100)).await; // the broker may be down
            Vec::new()
        }
    }
}

/// Receives until there are that many; acknowledges nothing.
pub async fn receive(consumer: &SimpleConsumer, topic: &str, tags: &str, count: usize) -> Vec<MessageView> {
    let (begin, mut received) = (Instant::now(), Vec::new());
    while received.len() < count {
        check(begin.elapsed() < LIMIT, &format!("{} messages of {} after {:?}", received.len(), topic, LIMIT));
        received.extend(receive_some(consumer, topic, tags, LIMIT).await);
    }
    check(received.len() == count, &format!("{} messages, expected {}", received.len(), count));
    received
}

pub fn text_of(message: &MessageView) -> String {
    String::from_utf8(message.body().to_vec()).unwrap()
}

pub fn message(topic: &str, text: &str) -> MessageBuilder {
    MessageBuilder::builder().set_topic(topic).set_body(text.as_bytes().to_vec())
}

pub fn due(topic: &str, text: &str, at_s: i64) -> impl Message {
    message(topic, text).set_delivery_timestamp(at_s).build().unwrap()
}

pub fn half(topic: &str, text: &str) -> impl Message {
    MessageBuilder::transaction_message_builder(topic, text.as_bytes().to_vec()).build().unwrap()
}
