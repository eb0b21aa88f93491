package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

// messages sends without delay; a push consumer gets some tags, a simple consumer all.
func messages() {
	const topic, each = "messages", 20
	in, from, reader := &inbox{}, startProducer(topic), startSimple("messages-simple", topic)
	startPush("messages-push", topic, "a || c", in, always)
	var mutex sync.Mutex
	ids := map[string]string{}
	for i := 0; i < each; i++ {
		ids[fmt.Sprintf("sync-%d", i)] = send(from, tagged(topic, "sync", i)).MessageID
	}
	for i := 0; i < each; i++ {
		text := fmt.Sprintf("async-%d", i)
		from.SendAsync(everything, tagged(topic, "async", i), func(_ context.Context, receipts []*rocketmq.SendReceipt, err error) {
			mutex.Lock()
			defer mutex.Unlock()
			if err == nil {
				ids[text] = receipts[0].MessageID
			}
		})
	}
	until("the answers to asynchronous sends", func() bool {
		mutex.Lock()
		defer mutex.Unlock()
		return len(ids) == 2*each
	})

	found := map[string]bool{}
	for _, got := range receive(reader, 2*each) {
		text := string(got.GetBody())
		number, _ := strconv.Atoi(strings.Split(text, "-")[1])
		check(got.GetMessageId() == ids[text], "the id of %s is %s", text, got.GetMessageId())
		check(got.GetTopic() == topic && got.GetDeliveryAttempt() == 1, "%s is %v", text, got)
		check(got.GetTag() != nil && *got.GetTag() == tag(number), "the tag of %s is another", text)
		check(slices.Equal(got.GetKeys(), []string{"key-" + text, "grün"}), "the keys of %s are %v", text, got.GetKeys())
		check(maps.Equal(got.GetProperties(), map[string]string{"colour": "rötlich"}), "%s has %v", text, got.GetProperties())
		must(reader.Ack(everything, got), "an acknowledgement")
		found[text] = true
	}
	check(len(found) == 2*each, "%d different messages were received", len(found))
	ok("%d messages, half of them sent asynchronously, arrived once each, with id, body, tag, keys and property, and were"+
		" acknowledged", 2*each)
	for _, got := range in.await(each, "messages of two tags") {
		check(*got.message.GetTag() == "a" || *got.message.GetTag() == "c", "%s arrived", got.text)
	}
	ok("a push consumer of a || c gets those tags and no others")
	again(from, reader)
	if os.Getenv("INTEROP_ACCESS_KEY") != "" {
		_, err := newProducer(topic, "another")
		check(err != nil && strings.Contains(err.Error(), "UNAUTHORIZED"), "a wrong secret: %v", err)
		ok("a wrong secret is refused: %v", err)
	}
}

func tagged(topic, name string, number int) *rocketmq.Message {
	made := message(topic, fmt.Sprintf("%s-%d", name, number))
	made.SetTag(tag(number))
	made.SetKeys("key-"+string(made.Body), "grün")
	made.AddProperty("colour", "rötlich")
	return made
}

func tag(number int) string {
	return "abcd"[number%4 : number%4+1]
}

func again(from rocketmq.Producer, reader rocketmq.SimpleConsumer) {
	send(from, message("messages", "again"))
	first := receive(reader, 1)[0]
	must(reader.ChangeInvisibleDuration(first, time.Second), "a change of the invisible time")
	second := receive(reader, 1)[0]
	check(first.GetMessageId() == second.GetMessageId(), "another message came: %v", second)
	check(second.GetDeliveryAttempt() == 2, "it is attempt %d", second.GetDeliveryAttempt())
	must(reader.Ack(everything, first), "an acknowledgement that is too late") // the client keeps the refusal to itself
	must(reader.Ack(everything, second), "an acknowledgement")
	ok("a message comes again after the invisible time that its consumer asked for")
}

// delays sends messages for later, one of which is recalled.
func delays() {
	const topic = "delays"
	in, from := &inbox{}, startProducer(topic)
	startPush("delays-push", topic, "*", in, always)
	doomed := send(from, due(topic, "recalled", nowMs()+2_000))
	dueMs := map[string]int64{}
	for _, delayMs := range []int64{-5_000, 700, 1_234, 2_345, 2_500} {
		text := fmt.Sprintf("in %d ms", delayMs)
		dueMs[text] = nowMs() + delayMs
		send(from, due(topic, text, dueMs[text]))
	}
	id, err := from.Recall(everything, topic, doomed.RecallHandle)
	must(err, "a recall")
	check(id == doomed.MessageID, "%s was recalled instead of %s", id, doomed.MessageID)
	_, err = from.Send(everything, due(topic, "never", nowMs()+20*365*24*3_600_000))
	refused(v2.Code_ILLEGAL_DELIVERY_TIME, "a delay of twenty years", err)

	for _, got := range in.await(len(dueMs), "delayed messages") {
		lateMs := got.atMs - dueMs[got.text]
		check(dueMs[got.text] > 0 && lateMs >= 0, "%s arrived %d ms early", got.text, -lateMs)
		ok("%s: arrived %d ms after due", got.text, lateMs)
	}
	ok("a message that was recalled stayed away")
}

// order has message groups: each comes in order, past a message that fails once, and past one that always fails. This
// client does not hold its followers back meanwhile.
func order() {
	const topic, each, attempts = "order", 10, 3
	in, from := &inbox{}, startProducer(topic)
	customers := []string{"anna", "bert", "carl"}
	for i := 0; i < each; i++ {
		for _, customer := range customers {
			one := message(topic, fmt.Sprintf("%s-%d", customer, i))
			one.SetMessageGroup(customer)
			send(from, one)
		}
	}
	startPush("order-push", topic, "*", in, func(got *rocketmq.MessageView) bool {
		text := string(got.GetBody())
		return text != "carl-4" && (text != "bert-4" || len(in.of(text)) > 1)
	})
	arrivals := in.await(3*each+1+attempts-1, "ordered messages")
	for _, customer := range customers {
		var expected, found []string
		for i := 0; i < each; i++ {
			expected = append(expected, fmt.Sprintf("%s-%d", customer, i))
		}
		for _, got := range arrivals {
			if *got.message.GetMessageGroup() == customer && !slices.Contains(found, got.text) {
				found = append(found, got.text)
			}
		}
		check(slices.Equal(expected, found), "messages of %s came as %v", customer, found)
	}
	check(len(in.of("bert-4")) == 2, "the message that fails once came %d times", len(in.of("bert-4")))
	check(len(in.of("carl-4")) == attempts, "the message that always fails came %d times", len(in.of("carl-4")))
	ok("three message groups came in order, one of their messages again")
	letter := deadLetter("order-push")
	check(string(letter.GetBody()) == "carl-4", "the dead letter is %s", letter.GetBody())
	ok("a message that always fails is a dead letter after %d attempts", attempts)
}

// transactions has some that end, and others about which the broker has to ask.
func transactions() {
	const topic = "transactions"
	in := &inbox{}
	startPush("transactions-push", topic, "*", in, always)
	var mutex sync.Mutex
	asked := map[string]int{}
	checker := &rocketmq.TransactionChecker{Check: func(got *rocketmq.MessageView) rocketmq.TransactionResolution {
		mutex.Lock()
		defer mutex.Unlock()
		text := string(got.GetBody())
		asked[text]++
		switch {
		case text == "asked twice" && asked[text] == 1:
			return rocketmq.UNKNOWN
		case strings.HasPrefix(text, "asked"):
			return rocketmq.COMMIT
		default:
			return rocketmq.ROLLBACK
		}
	}}
	from := startProducer(topic, rocketmq.WithTransactionChecker(checker))
	half := func(text string) rocketmq.Transaction {
		made := from.BeginTransaction()
		_, err := from.SendWithTransaction(everything, message(topic, text), made)
		must(err, "a half message")
		return made
	}
	half("forgotten")
	half("asked once")
	half("asked twice")
	must(half("rolled back").RollBack(), "a rollback")
	must(half("committed").Commit(), "a commit")
	until("the committed message", func() bool { return len(in.of("committed")) > 0 })
	ok("a committed message arrived")
	askedAbout := func() []string {
		mutex.Lock()
		defer mutex.Unlock()
		return slices.Sorted(maps.Keys(asked))
	}
	until("the broker asks about all three", func() bool { return len(askedAbout()) == 3 })
	check(slices.Equal(askedAbout(), []string{"asked once", "asked twice", "forgotten"}), "it asked about %v", askedAbout())
	in.await(3, "messages of transactions")
	for _, text := range []string{"committed", "asked once", "asked twice"} {
		check(len(in.of(text)) == 1, "%s did not arrive", text)
	}
	ok("the broker asked about open transactions, one of them twice; those rolled back stayed away")
}

// retries has a listener that fails: the group's policy says when a message comes again (after 1 s, after 2 s) and how
// often.
func retries() {
	const topic = "retries"
	in, from := &inbox{}, startProducer(topic)
	startPush("retries-push", topic, "*", in, func(got *rocketmq.MessageView) bool {
		return string(got.GetBody()) == "hard work" && got.GetDeliveryAttempt() == 3
	})
	send(from, message(topic, "hard work"))
	hopeless := message(topic, "hopeless")
	hopeless.SetKeys("order-8")
	receipt := send(from, hopeless)
	for _, text := range []string{"hard work", "hopeless"} {
		until("three attempts of "+text, func() bool { return len(in.of(text)) == 3 })
		for i, got := range in.of(text) {
			check(int(got.message.GetDeliveryAttempt()) == i+1, "attempt %d of %s says %v", i+1, text, got.message)
		}
	}
	hard := in.of("hard work")
	firstMs, secondMs := hard[1].atMs-hard[0].atMs, hard[2].atMs-hard[1].atMs
	check(firstMs >= 1_000 && secondMs >= 2_000, "it came again after %d and %d ms", firstMs, secondMs)
	ok("a message that failed twice came again after %d and %d ms", firstMs, secondMs)
	letter := deadLetter("retries-push")
	check(string(letter.GetBody()) == "hopeless", "the dead letter is %s", letter.GetBody())
	check(slices.Equal(letter.GetKeys(), []string{"order-8"}), "its keys are %v", letter.GetKeys())
	check(letter.GetMessageId() == receipt.MessageID, "its id is %s", letter.GetMessageId())
	check(len(in.all()) == 6, "%d attempts of two messages", len(in.all()))
	ok("after three attempts a message is a dead letter, received from %%DLQ%%retries-push")
}
