package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// How long to wait for something that must happen. Nothing is asserted about how soon it does.
const limit = 60 * time.Second

var clients int

// instance gives each client an id of its own: by default, those of one process share one.
func instance() string {
	clients++
	return fmt.Sprintf("%d-%d", os.Getpid(), clients)
}

// signing is what signs every request of a client; empty where nobody has said as whom.
func signing() primitive.Credentials {
	return primitive.Credentials{AccessKey: os.Getenv("INTEROP_ACCESS_KEY"), SecretKey: os.Getenv("INTEROP_SECRET_KEY")}
}

func newProducer(options ...producer.Option) rocketmq.Producer {
	named := []producer.Option{
		producer.WithNameServer([]string{route}),
		producer.WithGroupName("go-producer"),
		producer.WithInstanceName(instance()),
	}
	if credentials := signing(); credentials.AccessKey != "" {
		named = append(named, producer.WithCredentials(credentials))
	}
	made, err := rocketmq.NewProducer(append(named, options...)...)
	must(err, "a producer")
	must(made.Start(), "a producer starts")
	return made
}

// listener decides about a message that has just come.
type listener func(ctx context.Context, message *primitive.MessageExt) consumer.ConsumeResult

func succeed(context.Context, *primitive.MessageExt) consumer.ConsumeResult {
	return consumer.ConsumeSuccess
}

// newConsumer starts a consumer that puts what it gets into the inbox. An error is of the client itself.
func newConsumer(group, topic, tags string, inbox *inbox, decide listener, options ...consumer.Option) (rocketmq.PushConsumer, error) {
	named := []consumer.Option{
		consumer.WithNameServer([]string{route}),
		consumer.WithGroupName(group),
		consumer.WithInstance(instance()),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	}
	if credentials := signing(); credentials.AccessKey != "" {
		named = append(named, consumer.WithCredentials(credentials))
	}
	made, err := rocketmq.NewPushConsumer(append(named, options...)...)
	must(err, "a consumer")
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: tags}
	must(made.Subscribe(topic, selector, func(ctx context.Context, got ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		result := consumer.ConsumeSuccess
		for _, message := range got {
			inbox.add(message)
			result = decide(ctx, message)
		}
		return result, nil
	}), "a subscription")
	return made, made.Start()
}

func startConsumer(group, topic, tags string, inbox *inbox, decide listener, options ...consumer.Option) rocketmq.PushConsumer {
	made, err := newConsumer(group, topic, tags, inbox, decide, options...)
	must(err, "a consumer starts")
	return made
}

func send(from rocketmq.Producer, messages ...*primitive.Message) *primitive.SendResult {
	result, err := from.SendSync(context.Background(), messages...)
	must(err, "a send")
	check(result.Status == primitive.SendOK, "a send was answered with %v", result)
	return result
}

func message(topic, text string) *primitive.Message {
	return primitive.NewMessage(topic, []byte(text))
}

func nowMs() int64 {
	return time.Now().UnixNano() / int64(time.Millisecond)
}

func until(what string, holds func() bool) {
	for end := time.Now().Add(limit); !holds(); time.Sleep(5 * time.Millisecond) {
		check(time.Now().Before(end), "waited %v in vain: %s", limit, what)
	}
}

// An arrival is a message as a listener got it. The client changes messages afterwards.
type arrival struct {
	text, key, tag, topic, id string
	queue                     int
	offset                    int64
	times                     int32
	atMs                      int64
	properties                map[string]string
}

// An inbox has everything that arrived, in order.
type inbox struct {
	mutex    sync.Mutex
	arrivals []arrival
}

func (in *inbox) add(message *primitive.MessageExt) {
	got := arrival{
		text: string(message.Body), key: message.GetKeys(), tag: message.GetTags(), topic: message.Topic, id: message.MsgId,
		queue: message.Queue.QueueId, offset: message.QueueOffset, times: message.ReconsumeTimes, atMs: nowMs(),
		properties: message.GetProperties(),
	}
	in.mutex.Lock()
	defer in.mutex.Unlock()
	in.arrivals = append(in.arrivals, got)
}

func (in *inbox) all() []arrival {
	in.mutex.Lock()
	defer in.mutex.Unlock()
	return append([]arrival{}, in.arrivals...)
}

func (in *inbox) byText() map[string]arrival {
	found := map[string]arrival{}
	for _, got := range in.all() {
		if _, is := found[got.text]; !is {
			found[got.text] = got
		}
	}
	return found
}

// await waits for so many arrivals, and makes sure that there is not one more.
func (in *inbox) await(count int, what string) []arrival {
	until(fmt.Sprintf("%d of %s", count, what), func() bool { return len(in.all()) >= count })
	check(len(in.all()) == count, "%s: %d arrived, expected %d", what, len(in.all()), count)
	return in.all()
}
