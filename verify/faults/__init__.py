"""A suite of faults for delayed messages: it disturbs real processes, and checks that what clients were told holds.

driver      what the suite needs of a broker; remoting and machine implement it for Postdate
workload    producers, cancels that race the due instant, consumers, jobs, imports
troubles    the faults: kills, pauses, lost power, full disks, flipped bits, clocks that jump, two of a kind
layer       between the processes and their files: what is not synced can be lost
history     what each client was told, recorded outside the broker
checker     nine invariants over a history
run         an episode from an empty folder to the verdict
"""
