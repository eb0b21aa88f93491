// RocketMQ's Go client against a broker: `interop PROGRAM ROUTE`. A program prints a line for each check; the first that
// fails ends it with a sentence and exit code 1.
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/apache/rocketmq-client-go/v2/rlog"
)

var programs = map[string]func(){
	"Messages": messages,
	"Delays":   delays,
	"Retries":  retries,
	"Restart":  restart,
}

var route string

// failure is what a check panics with, so that main can tell it from a mistake of the program.
type failure string

func main() {
	route = os.Args[2]
	rlog.SetLogLevel("warn")
	if err := rlog.SetOutputPath("rocketmq_client.log"); err != nil {
		panic(err)
	}
	defer func() {
		problem := recover()
		if sentence, is := problem.(failure); is {
			fmt.Println("FAILED: " + string(sentence))
			os.Exit(1)
		}
		if problem != nil {
			panic(problem)
		}
	}()
	programs[os.Args[1]]()
}

// ok prints one line: the client adds lines of its own to what a broker says.
func ok(format string, values ...interface{}) {
	fmt.Println("ok: " + strings.Split(fmt.Sprintf(format, values...), "\n")[0])
}

func check(holds bool, format string, values ...interface{}) {
	if !holds {
		panic(failure(fmt.Sprintf(format, values...)))
	}
}

func must(err error, what string) {
	check(err == nil, "%s: %v", what, err)
}
