"""Our own client beside a Java consumer, in one group: Mixed.java starts it and reads what it prints.

It prints "got TEXT" for each message. One whose text begins with "hold" it never finishes. "stop" on its standard input
ends it in peace, "die" at once, with what it has in hand.
"""

import os
import sys
import threading

import postdate


def main(address: str, group: str, topic: str) -> None:
    lock = threading.Lock()  # print writes a line and its end apart

    def handle(message: postdate.ReceivedMessage) -> None:
        text = message.body.decode()
        with lock:
            print(f"got {text}", flush=True)
        if text.startswith("hold"):
            threading.Event().wait()

    def obey() -> None:
        if sys.stdin.readline().strip() == "stop":
            client.stop()
        else:
            os._exit(9)

    with postdate.connect(address) as client:
        threading.Thread(target=obey, daemon=True).start()
        client.listen(topic, group, handle, threads=4)


if __name__ == "__main__":
    main(*sys.argv[1:])
