"""A plain worker: prints reminders as they fall due, until SIGTERM: python examples/worker.py

Run it under a supervisor; worker.service is a unit for systemd. Several such processes share the topic. A handler that
raises has its message come again later, and after the last attempt it is a dead letter. POSTDATE_ADDR says where the
broker is.
"""

import logging

import postdate

TOPIC, GROUP = "reminders", "reminder-worker"


def remind(message: postdate.ReceivedMessage) -> None:
    print(f"reminder: {message.body.decode()}", flush=True)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with postdate.connect() as client:
        client.listen(TOPIC, GROUP, remind)


if __name__ == "__main__":
    main()
