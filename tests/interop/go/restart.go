package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

const (
	restartTopic = "restart"
	before       = 100 // acknowledged messages before the restart
)

// A sending goes on until it is told to end, and remembers what was acknowledged.
type sending struct {
	mutex    sync.Mutex
	dueMs    map[string]int64
	failures int
	end      chan struct{}
	ended    sync.WaitGroup
}

// restart has a broker that is killed and started again under a producer and a consumer. Whoever runs this program does
// it when "restart please" is printed, and writes a line. Once is enough: the client waits up to 30 s for the answer to a
// pull whose connection is gone.
func restart() {
	in := &inbox{}
	startConsumer("restart-group", restartTopic, "*", in, succeed)
	sent := &sending{dueMs: map[string]int64{}, end: make(chan struct{})}
	sent.ended.Add(1)
	go sent.run(newProducer())
	input := bufio.NewReader(os.Stdin)
	until("messages before the restart", func() bool { return sent.count() >= before && len(in.all()) > 0 })
	fmt.Println("restart please")
	_, err := input.ReadString('\n')
	must(err, "somebody restarts the broker")
	upAtMs, seen := nowMs(), len(in.all())
	until("the consumer reads again", func() bool { return len(in.all()) > seen+10 })
	ok("the consumer reads again %d ms after the broker is up", nowMs()-upAtMs)
	close(sent.end)
	sent.ended.Wait()
	sent.judge(in)
}

// run sends one after the other: at once, or up to five seconds later, so that some are due while the broker is down.
func (sent *sending) run(from rocketmq.Producer) {
	defer sent.ended.Done()
	for i := int64(0); ; i++ {
		select {
		case <-sent.end:
			return
		case <-time.After(5 * time.Millisecond):
		}
		one, delayMs := message(restartTopic, fmt.Sprintf("kept-%d", i)), int64(0)
		if i%2 == 1 {
			delayMs = 50 * (i % 100)
			one.WithProperty("TIMER_DELAY_MS", strconv.FormatInt(delayMs, 10))
		}
		dueMs := nowMs() + delayMs
		result, err := from.SendSync(context.Background(), one)
		sent.note(string(one.Body), dueMs, err == nil && result.Status == primitive.SendOK)
	}
}

func (sent *sending) note(text string, dueMs int64, acknowledged bool) {
	sent.mutex.Lock()
	defer sent.mutex.Unlock()
	if acknowledged {
		sent.dueMs[text] = dueMs
	} else {
		sent.failures++
	}
}

func (sent *sending) count() int {
	sent.mutex.Lock()
	defer sent.mutex.Unlock()
	return len(sent.dueMs)
}

func (sent *sending) judge(in *inbox) {
	until(fmt.Sprintf("all %d acknowledged messages", len(sent.dueMs)), func() bool {
		arrivals := in.byText()
		for text := range sent.dueMs {
			if _, is := arrivals[text]; !is {
				return false
			}
		}
		return true
	})
	for _, got := range in.all() {
		dueMs, is := sent.dueMs[got.text]
		check(!is || got.atMs >= dueMs, "%s arrived before it was due, after a restart", got.text)
	}
	again := len(in.all()) - len(in.byText())
	ok("%d acknowledged messages arrived, none early, none lost; %d came twice, %d sends failed while the broker was down",
		len(sent.dueMs), again, sent.failures)
}
