package main

import (
	"bufio"
	"fmt"
	"os"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
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

// restart has a broker that is killed and started again under a producer and a consumer, by the process that reads our
// output.
func restart() {
	in := &inbox{}
	startPush("restart-push", restartTopic, "*", in, always)
	sent := &sending{dueMs: map[string]int64{}, end: make(chan struct{})}
	sent.ended.Add(1)
	go sent.run(startProducer(restartTopic))
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

// run sends one after the other: at once, or up to two seconds later, so that some are due while the broker is down.
func (sent *sending) run(from rocketmq.Producer) {
	defer sent.ended.Done()
	for i := int64(0); ; i++ {
		select {
		case <-sent.end:
			return
		case <-time.After(5 * time.Millisecond):
		}
		text, atMs := fmt.Sprintf("kept-%d", i), nowMs()
		one := message(restartTopic, text)
		if i%2 == 1 {
			atMs += 20 * (i % 100)
			one.SetDelayTimestamp(time.UnixMilli(atMs))
		}
		_, err := from.Send(everything, one)
		sent.note(text, atMs, err == nil)
	}
}

func (sent *sending) note(text string, atMs int64, acknowledged bool) {
	sent.mutex.Lock()
	defer sent.mutex.Unlock()
	if acknowledged {
		sent.dueMs[text] = atMs
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
	texts := map[string]bool{}
	until(fmt.Sprintf("all %d acknowledged messages", len(sent.dueMs)), func() bool {
		for _, got := range in.all() {
			texts[got.text] = true
		}
		for text := range sent.dueMs {
			if !texts[text] {
				return false
			}
		}
		return true
	})
	for _, got := range in.all() {
		check(got.atMs >= sent.dueMs[got.text], "%s arrived before it was due, after a restart", got.text)
	}
	ok("%d acknowledged messages arrived, none early, none lost; %d came twice, %d sends failed while the broker was down",
		len(sent.dueMs), len(in.all())-len(texts), sent.failures)
}
