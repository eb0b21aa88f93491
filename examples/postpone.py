"""A campaign that comes two hours later than it was to come, for those who have not got it yet.

    python examples/campaign.py          schedules it
    python examples/postpone.py          or: python examples/postpone.py 127.0.0.1:9876 --zone Asia/Kolkata --by 1d

Run twice, it postpones once: the job has an id.
"""

import argparse

import postdate


def main() -> None:
    parser = argparse.ArgumentParser(description="Postpones reminders.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:9876", help="the broker's route address")
    parser.add_argument("--zone", default="", help="only of customers who live there")
    parser.add_argument("--by", default="2h")
    parser.add_argument("--id", default="campaign-is-late")
    arguments = parser.parse_args()

    where = "topic = 'reminders'"
    if arguments.zone:
        where += f" and properties['zone'] = '{arguments.zone}'"
    with postdate.connect(arguments.address) as client:
        done = client.postpone_where(where, by=arguments.by, id=arguments.id)
    print(f"{done.changed:,} reminders come {arguments.by} later, for {done.late:,} it was too late")


if __name__ == "__main__":
    main()
