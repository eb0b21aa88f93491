package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

const (
	// To wait for something that must happen; nothing is asserted about how soon it does. A message that was on its way to
	// a push consumer when the broker was killed comes again after a minute.
	limit     = 100 * time.Second
	invisible = 60 * time.Second // longer than any check takes
	await     = 5 * time.Second
)

var everything = context.Background()

func config(group, secret string) *rocketmq.Config {
	signing := &credentials.SessionCredentials{AccessKey: os.Getenv("INTEROP_ACCESS_KEY"), AccessSecret: secret}
	return &rocketmq.Config{Endpoint: address, ConsumerGroup: group, Credentials: signing}
}

func newProducer(topic, secret string, options ...rocketmq.ProducerOption) (rocketmq.Producer, error) {
	made, err := rocketmq.NewProducer(config("", secret), append(options, rocketmq.WithTopics(topic))...)
	must(err, "a producer")
	return made, made.Start()
}

func startProducer(topic string, options ...rocketmq.ProducerOption) rocketmq.Producer {
	made, err := newProducer(topic, os.Getenv("INTEROP_SECRET_KEY"), options...)
	must(err, "a producer starts")
	return made
}

// startPush starts a consumer that puts what it gets into the inbox, then lets the listener decide. It ends with the
// process: it has asked the broker for messages, and stopping it waits for the answer.
func startPush(group, topic, tags string, in *inbox, isDone func(*rocketmq.MessageView) bool) {
	listener := &rocketmq.FuncMessageListener{Consume: func(got *rocketmq.MessageView) rocketmq.ConsumerResult {
		in.add(got)
		if isDone(got) {
			return rocketmq.SUCCESS
		}
		return rocketmq.FAILURE
	}}
	made, err := rocketmq.NewPushConsumer(config(group, os.Getenv("INTEROP_SECRET_KEY")),
		rocketmq.WithPushAwaitDuration(await),
		rocketmq.WithPushMessageListener(listener),
		rocketmq.WithPushSubscriptionExpressions(filter(topic, tags)))
	must(err, "a push consumer")
	must(made.Start(), "a push consumer starts")
}

func always(*rocketmq.MessageView) bool { return true }

func filter(topic, tags string) map[string]*rocketmq.FilterExpression {
	return map[string]*rocketmq.FilterExpression{topic: rocketmq.NewFilterExpression(tags)}
}

func newSimple(group, topic string) (rocketmq.SimpleConsumer, error) {
	made, err := rocketmq.NewSimpleConsumer(config(group, os.Getenv("INTEROP_SECRET_KEY")),
		rocketmq.WithSimpleAwaitDuration(await), rocketmq.WithSimpleSubscriptionExpressions(filter(topic, "*")))
	must(err, "a simple consumer")
	return made, made.Start()
}

func startSimple(group, topic string) rocketmq.SimpleConsumer {
	made, err := newSimple(group, topic)
	must(err, "a simple consumer starts")
	return made
}

// receive waits until there are that many; it acknowledges nothing.
func receive(from rocketmq.SimpleConsumer, count int) []*rocketmq.MessageView {
	var received []*rocketmq.MessageView
	until(fmt.Sprintf("%d messages of %s", count, from.GetGroupName()), func() bool {
		got, err := from.Receive(everything, 32, invisible)
		check(err == nil || codeOf(err) == v2.Code_MESSAGE_NOT_FOUND, "a receive: %v", err)
		received = append(received, got...)
		return len(received) >= count
	})
	check(len(received) == count, "%d messages, expected %d", len(received), count)
	return received
}

// deadLetter returns the one of a group, acknowledged. There may be no such topic before the first one.
func deadLetter(group string) *rocketmq.MessageView {
	var reader rocketmq.SimpleConsumer
	until("a topic for dead letters of "+group, func() bool {
		var err error
		reader, err = newSimple(group+"-letters", "%DLQ%"+group)
		return err == nil
	})
	letter := receive(reader, 1)[0]
	must(reader.Ack(everything, letter), "a dead letter is acknowledged")
	return letter
}

func send(from rocketmq.Producer, one *rocketmq.Message) *rocketmq.SendReceipt {
	receipts, err := from.Send(everything, one)
	must(err, "a send")
	check(len(receipts) == 1, "a send was answered with %d receipts", len(receipts))
	return receipts[0]
}

func message(topic, text string) *rocketmq.Message {
	return &rocketmq.Message{Topic: topic, Body: []byte(text)}
}

func due(topic, text string, atMs int64) *rocketmq.Message {
	made := message(topic, text)
	made.SetDelayTimestamp(time.UnixMilli(atMs))
	return made
}

func nowMs() int64 {
	return time.Now().UnixMilli()
}

// codeOf is the broker's code; 0 where the error is not the broker's.
func codeOf(err error) v2.Code {
	var status *rocketmq.ErrRpcStatus
	if errors.As(err, &status) {
		return v2.Code(status.Code)
	}
	return 0
}

func refused(code v2.Code, what string, err error) {
	check(err != nil, "%s was not refused", what)
	check(codeOf(err) == code, "%s was refused otherwise: %v", what, err)
	ok("%s is refused: %d %v", what, code, err)
}

func until(what string, holds func() bool) {
	for end := time.Now().Add(limit); !holds(); time.Sleep(5 * time.Millisecond) {
		check(time.Now().Before(end), "waited %v in vain: %s", limit, what)
	}
}

// An arrival is a message as a push consumer got it.
type arrival struct {
	text    string
	message *rocketmq.MessageView
	atMs    int64
}

// An inbox has everything that arrived, in order.
type inbox struct {
	mutex    sync.Mutex
	arrivals []arrival
}

func (in *inbox) add(got *rocketmq.MessageView) {
	in.mutex.Lock()
	defer in.mutex.Unlock()
	in.arrivals = append(in.arrivals, arrival{string(got.GetBody()), got, nowMs()})
}

func (in *inbox) all() []arrival {
	in.mutex.Lock()
	defer in.mutex.Unlock()
	return append([]arrival{}, in.arrivals...)
}

func (in *inbox) of(text string) []arrival {
	var found []arrival
	for _, got := range in.all() {
		if got.text == text {
			found = append(found, got)
		}
	}
	return found
}

// await waits for that many arrivals, and makes sure that there is not one more.
func (in *inbox) await(count int, what string) []arrival {
	until(fmt.Sprintf("%d of %s", count, what), func() bool { return len(in.all()) >= count })
	check(len(in.all()) == count, "%s: %d arrived, expected %d", what, len(in.all()), count)
	return in.all()
}
