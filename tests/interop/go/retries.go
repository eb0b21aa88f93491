package main

import (
	"context"
	"fmt"
	"strings"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// retries has one story per group: each fails in its own way. Levels are 1 s, 2 s, 1 s, 2 s, 3 s, ...
func retries() {
	from := newProducer()
	again(from)
	chosenLevel(from)
	deadLetter(from)
	orderlyDeadLetter(from)
}

// again leaves the delay to the broker: level 3, then 4.
func again(from rocketmq.Producer) {
	in := &inbox{}
	sent := send(from, message("again", "hard work").WithKeys([]string{"order-7"}).WithTag("paid"))
	startConsumer("again-group", "again", "paid", in, func(_ context.Context, got *primitive.MessageExt) consumer.ConsumeResult {
		if got.ReconsumeTimes < 2 {
			return consumer.ConsumeRetryLater
		}
		return consumer.ConsumeSuccess
	})
	arrivals := in.await(3, "attempts")
	for i, got := range arrivals {
		check(got.times == int32(i), "attempt %d says that it came back %d times", i, got.times)
		check(got.text == "hard work" && strings.TrimSpace(got.key) == "order-7" && got.topic == "again", "a retry is %v", got)
	}
	first, second := arrivals[1].atMs-arrivals[0].atMs, arrivals[2].atMs-arrivals[1].atMs
	check(first >= 1_000 && second >= 2_000, "retries came after %d and %d ms, expected 1 and 2 s", first, second)
	check(arrivals[2].properties["UNIQ_KEY"] == sent.MsgID, "the retry has another id: %v", arrivals[2].properties)
	ok("a message that failed twice came again after %d and %d ms", first, second)
}

func chosenLevel(from rocketmq.Producer) {
	in := &inbox{}
	send(from, message("chosen", "work"))
	startConsumer("chosen-group", "chosen", "*", in, func(ctx context.Context, got *primitive.MessageExt) consumer.ConsumeResult {
		retry, _ := primitive.GetConcurrentlyCtx(ctx)
		retry.DelayLevelWhenNextConsume = 5
		if got.ReconsumeTimes == 0 {
			return consumer.ConsumeRetryLater
		}
		return consumer.ConsumeSuccess
	})
	arrivals := in.await(2, "attempts of a chosen level")
	gap := arrivals[1].atMs - arrivals[0].atMs
	check(gap >= 3_000, "the retry came after %d ms, expected 3 s", gap)
	ok("a retry with level 5 came after %d ms", gap)
}

func deadLetter(from rocketmq.Producer) {
	in := &inbox{}
	sent := send(from, message("dead", "hopeless").WithKeys([]string{"order-8"}))
	startConsumer("dead-group", "dead", "*", in, failAtLevel1, consumer.WithMaxReconsumeTimes(2))
	letter := awaitLetter("dead-group")
	check(len(in.all()) == 3, "%d attempts with two retries allowed", len(in.all()))
	check(letter.text == "hopeless" && letter.properties["RETRY_TOPIC"] == "dead", "the dead letter is %v", letter)
	check(letter.properties["UNIQ_KEY"] == sent.MsgID, "the dead letter has another id: %v", letter.properties)
	ok("after two retries a message is a dead letter, read from %%DLQ%%dead-group")
}

// orderlyDeadLetter shows the other way: the client itself tries again, and in the end sends back with level -1.
func orderlyDeadLetter(from rocketmq.Producer) {
	in := &inbox{}
	send(from, message("stuck", "hopeless in order"))
	startConsumer("stuck-group", "stuck", "*", in, func(ctx context.Context, _ *primitive.MessageExt) consumer.ConsumeResult {
		retry, _ := primitive.GetOrderlyCtx(ctx)
		retry.SuspendCurrentQueueTimeMillis = 100
		return consumer.SuspendCurrentQueueAMoment
	}, consumer.WithConsumerOrder(true), consumer.WithMaxReconsumeTimes(2))
	letter := awaitLetter("stuck-group")
	check(letter.text == "hopeless in order", "the dead letter is %v", letter)
	ok("an orderly consumer's message is a dead letter after %d attempts", len(in.all()))
}

func failAtLevel1(ctx context.Context, _ *primitive.MessageExt) consumer.ConsumeResult {
	retry, _ := primitive.GetConcurrentlyCtx(ctx)
	retry.DelayLevelWhenNextConsume = 1
	return consumer.ConsumeRetryLater
}

// awaitLetter starts readers until there is a topic to read: the client gives up on one without a route.
func awaitLetter(group string) arrival {
	letters := &inbox{}
	attempts := 0
	until("dead letters of "+group, func() bool {
		attempts++
		_, err := newConsumer(fmt.Sprintf("%s-reader-%d", group, attempts), "%DLQ%"+group, "*", letters, succeed)
		return err == nil
	})
	return letters.await(1, "dead letters")[0]
}
