package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

const delaysTopic = "delays"

// A timetable says when each message that was sent is due at the earliest, by its text.
type timetable struct {
	from  rocketmq.Producer
	dueMs map[string]int64
	texts []string
}

// delays asks in every way, and compares each arrival with the time of sending. Levels are 1 s, 2 s, 1 s, ...
func delays() {
	table := &timetable{from: newProducer(), dueMs: map[string]int64{}}
	in := &inbox{}
	startConsumer("delays-group", delaysTopic, "*", in, succeed)
	send(table.from, message(delaysTopic, "hello"))
	in.await(1, "the first message") // from here on the consumer is no longer what messages wait for

	table.send(message(delaysTopic, "WithDelayTimeLevel(1)").WithDelayTimeLevel(1), 1_000)
	table.send(message(delaysTopic, "WithDelayTimeLevel(2)").WithDelayTimeLevel(2), 2_000)
	table.send(with("TIMER_DELAY_SEC", "2"), 2_000)
	table.send(with("TIMER_DELAY_MS", "1234"), 1_234)
	for i, delayMs := range []int64{2_567, 1_765, -5_000} {
		atMs := nowMs() + delayMs
		table.sendDue(with([]string{"TIMER_DELIVER_MS", "__STARTDELIVERTIME"}[i%2], strconv.FormatInt(atMs, 10)), atMs)
	}
	table.sendBatch()
	table.sendSpread(200)
	refused(table.from, with("TIMER_DELAY_MS", "soon"))
	refused(table.from, with("TIMER_DELAY_SEC", strconv.Itoa(20*365*24*3_600)))

	table.judge(byTextOf(in.await(1+len(table.texts), "delayed messages")))
}

// with makes a message that asks by a property.
func with(name, value string) *primitive.Message {
	made := message(delaysTopic, name+" = "+value)
	made.WithProperty(name, value)
	return made
}

func (table *timetable) send(one *primitive.Message, delayMs int64) {
	table.sendDue(one, nowMs()+delayMs)
}

func (table *timetable) sendDue(one *primitive.Message, atMs int64) {
	table.expect(one, atMs)
	send(table.from, one)
}

func (table *timetable) expect(one *primitive.Message, atMs int64) {
	text := string(one.Body)
	table.dueMs[text] = atMs
	table.texts = append(table.texts, text)
}

func (table *timetable) sendBatch() {
	var members []*primitive.Message
	for i, delayMs := range []int64{0, 1_500, 2_500} {
		one := message(delaysTopic, fmt.Sprintf("member %d of a batch, TIMER_DELAY_MS = %d", i, delayMs))
		one.WithProperty("TIMER_DELAY_MS", strconv.FormatInt(delayMs, 10))
		table.expect(one, nowMs()+delayMs)
		members = append(members, one)
	}
	send(table.from, members...)
}

func (table *timetable) sendSpread(count int64) {
	firstMs := nowMs() + 2_000
	for i := int64(0); i < count; i++ {
		one := message(delaysTopic, fmt.Sprintf("spread-%d", i))
		one.WithProperty("TIMER_DELIVER_MS", strconv.FormatInt(firstMs+10*i, 10))
		table.sendDue(one, firstMs+10*i)
	}
}

func refused(from rocketmq.Producer, one *primitive.Message) {
	result, err := from.SendSync(context.Background(), one)
	check(err != nil, "%s was not refused: %v", one.Body, result)
	check(strings.Contains(err.Error(), "CODE: 13"), "%s was refused otherwise: %v", one.Body, err)
	ok("%s is refused: %v", one.Body, err)
}

func (table *timetable) judge(arrivals map[string]arrival) {
	spread, latestMs := 0, int64(0)
	for _, text := range table.texts {
		got, is := arrivals[text]
		check(is, "%s did not arrive", text)
		lateMs := got.atMs - table.dueMs[text]
		check(lateMs >= 0, "%s arrived %d ms before it was due", text, -lateMs)
		if !strings.HasPrefix(text, "spread-") {
			ok("%s: arrived %d ms after due", text, lateMs)
			continue
		}
		spread++
		if lateMs > latestMs {
			latestMs = lateMs
		}
	}
	ok("%d instants, 10 ms apart: none early, the latest by %d ms", spread, latestMs)
}
