// RocketMQ's Go client for gRPC against a broker: one part after the other. The argument is the broker's address. A line
// is printed for each check; the first that fails ends it with a sentence and exit code 1.
package main

import (
	"fmt"
	"os"
	"runtime/debug"
	"strings"

	rocketmq "github.com/apache/rocketmq-clients/golang/v5"
)

var address string

// failure is what a check panics with, so that main can tell it from a mistake of the program.
type failure string

func main() {
	address = os.Args[1]
	rocketmq.EnableSsl = os.Getenv("INTEROP_CA_FILE") != "" // it trusts every certificate
	defer func() {
		problem := recover()
		if sentence, is := problem.(failure); is {
			fmt.Println("FAILED: " + string(sentence))
			fmt.Println(string(debug.Stack()))
			os.Exit(1)
		}
		if problem != nil {
			panic(problem)
		}
	}()
	messages()
	delays()
	order()
	transactions()
	retries()
	restart()
}

func ok(format string, values ...any) {
	fmt.Println("ok: " + strings.Split(fmt.Sprintf(format, values...), "\n")[0])
}

func check(holds bool, format string, values ...any) {
	if !holds {
		panic(failure(fmt.Sprintf(format, values...)))
	}
}

func must(err error, what string) {
	check(err == nil, "%s: %v", what, err)
}
