package main

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

func messages() {
	plain()
	tags()
	batch()
	order()
	share()
	broadcast()
}

func plain() {
	const topic, count = "plain", 100
	from := newProducer()
	in := &inbox{}
	reader := startConsumer("plain-group", topic, "*", in, succeed) // before there is a topic
	for i := 0; i < count; i++ {
		one := message(topic, fmt.Sprintf("body-%d", i)).WithKeys([]string{fmt.Sprintf("key-%d", i), "grün"}).WithTag("paid")
		one.WithProperty("colour", "rötlich")
		send(from, one)
	}
	for text, got := range byTextOf(in.await(count, "messages with keys")) {
		number := strings.TrimPrefix(text, "body-")
		check(strings.TrimSpace(got.key) == "key-"+number+" grün", "the keys of %s are %q", text, got.key)
		check(got.tag == "paid" && got.topic == topic, "%s has tag %q, topic %q", text, got.tag, got.topic)
		check(got.properties["colour"] == "rötlich", "%s has properties %v", text, got.properties)
	}
	ok("%d messages arrived once each, with body, keys, tag and property", count)

	large := strings.Repeat("x", 20_000) // compressed by the client
	send(from, message(topic, large))
	answer := make(chan error, 2) // the client may call back twice
	must(from.SendAsync(context.Background(), func(_ context.Context, _ *primitive.SendResult, err error) {
		answer <- err
	}, message(topic, "async")), "an asynchronous send")
	must(<-answer, "the answer to an asynchronous send")
	must(from.SendOneWay(context.Background(), message(topic, "oneway")), "a oneway send")
	texts := byTextOf(in.await(count+3, "messages of all kinds"))
	for _, text := range []string{large, "async", "oneway"} {
		_, is := texts[text]
		check(is, "a message is missing: %.20s", text)
	}
	ok("a large message, an asynchronous and a oneway one arrived")
	must(reader.Shutdown(), "a consumer ends")
	must(from.Shutdown(), "a producer ends")
}

func tags() {
	const topic = "tagged"
	from := newProducer()
	in := &inbox{}
	for _, tag := range []string{"a", "b", "c", "d"} {
		send(from, message(topic, "early "+tag).WithTag(tag))
	}
	startConsumer("tagged-group", topic, "a || c", in, succeed)
	in.await(2, "early messages of two tags")
	for _, tag := range []string{"a", "b", "c", "d"} {
		send(from, message(topic, "late "+tag).WithTag(tag))
	}
	for _, got := range in.await(4, "messages of two tags") {
		check(got.tag == "a" || got.tag == "c", "a message with tag %q arrived", got.tag)
	}
	ok("a consumer of a || c gets those tags and no others")
}

func batch() {
	const topic = "batch"
	from := newProducer()
	in := &inbox{}
	startConsumer("batch-group", topic, "*", in, succeed)
	var members []*primitive.Message
	for i := 0; i < 10; i++ {
		members = append(members, message(topic, fmt.Sprintf("member-%d", i)).WithKeys([]string{fmt.Sprintf("key-%d", i)}))
	}
	result := send(from, members...)
	check(strings.Count(result.OffsetMsgID, ",") == 9, "a batch was answered with %v", result)
	for text, got := range byTextOf(in.await(10, "members of a batch")) {
		check(strings.TrimSpace(got.key) == "key-"+strings.TrimPrefix(text, "member-"), "%s has key %q", text, got.key)
	}
	ok("the ten members of a batch arrived one by one")
}

// order has a listener that fails once in the middle: what follows in that queue has to wait.
func order() {
	const topic, each = "ordered", 20
	from := newProducer(producer.WithQueueSelector(producer.NewHashQueueSelector()))
	in := &inbox{}
	var failures int32
	for i := 0; i < each; i++ {
		for _, customer := range []string{"anna", "bert", "carl"} {
			send(from, message(topic, fmt.Sprintf("%s-%d", customer, i)).WithShardingKey(customer))
		}
	}
	startConsumer("ordered-group", topic, "*", in, func(ctx context.Context, got *primitive.MessageExt) consumer.ConsumeResult {
		if string(got.Body) == "bert-7" && atomic.AddInt32(&failures, 1) == 1 {
			retry, _ := primitive.GetOrderlyCtx(ctx)
			retry.SuspendCurrentQueueTimeMillis = 100
			return consumer.SuspendCurrentQueueAMoment
		}
		return consumer.ConsumeSuccess
	}, consumer.WithConsumerOrder(true))
	next := map[string]int{}
	for _, got := range in.await(3*each+1, "ordered messages, one of them twice") {
		parts := strings.Split(got.text, "-")
		if got.text == "bert-7" && next["bert"] == 8 {
			continue
		}
		check(parts[1] == fmt.Sprint(next[parts[0]]), "%s came where %d was expected", got.text, next[parts[0]])
		next[parts[0]]++
	}
	ok("an orderly consumer got %d messages in order, one of them again before its followers", 3*each)
}

func share() {
	const topic, count = "shared", 100
	from := newProducer()
	first, second := &inbox{}, &inbox{}
	one := startConsumer("shared-group", topic, "*", first, succeed)
	startConsumer("shared-group", topic, "*", second, succeed)
	sent := 0
	until("both members of a group have work", func() bool {
		send(from, message(topic, fmt.Sprintf("shared-%d", sent)))
		sent++
		return len(first.all()) > 0 && len(second.all()) > 0
	})
	for i := 0; i < count; i++ {
		send(from, message(topic, fmt.Sprintf("shared-%d", sent)))
		sent++
	}
	until("all shared messages", func() bool {
		return len(byTextOf(append(first.all(), second.all()...))) == sent
	})
	ok("two members of a group share %d messages: %d and %d", sent, len(first.all()), len(second.all()))
	must(one.Shutdown(), "a member leaves")
	begin := sent
	for i := 0; i < count; i++ {
		send(from, message(topic, fmt.Sprintf("shared-%d", sent)))
		sent++
	}
	until("what came after a member left", func() bool {
		return len(byTextOf(append(first.all(), second.all()...))) == sent
	})
	ok("the one that stays gets the next %d", sent-begin)
}

func broadcast() {
	const topic, count = "broadcast", 10
	from := newProducer()
	inboxes := []*inbox{{}, {}}
	for _, in := range inboxes {
		startConsumer("broadcast-group", topic, "*", in, succeed, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	for i := 0; i < count; i++ {
		send(from, message(topic, fmt.Sprintf("broadcast-%d", i)))
	}
	for _, in := range inboxes {
		check(len(byTextOf(in.await(count, "broadcast messages"))) == count, "a broadcast message is missing")
	}
	ok("both broadcasting consumers get all %d messages", count)
}

func byTextOf(arrivals []arrival) map[string]arrival {
	in := &inbox{arrivals: arrivals}
	return in.byText()
}
