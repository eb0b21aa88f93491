"""Requests, one file for each kind. The table in wire/requests.py names the file and the method that answer each.

send.py      sends, single and in batches
recall.py    cancels: by handle, by key, by delete marker
pull.py      pulls, and pulls that wait
pop.py       pops, acknowledgements, invisible times
group.py     consumer groups: heartbeats, offsets, locks, assignments, retries, definitions
topic.py     topics: definitions, bounds of queues, creation on first use
route.py     what a name server answers
find.py      messages by key, id and place
pending.py   counts of what waits
jobs.py      jobs: imports, bulk cancels, bulk changes
pipeline.py  the pipeline's control: state, stages, reports
tools.py     what RocketMQ's tools ask about clients and groups
status.py    figures, rates and settings of the broker
"""
