"""A suite of faults for delayed messages: real processes suffer, and what clients were told must hold.

driver      what the suite needs of a broker; remoting and machine are those of Postdate
workload    producers, cancels that race the due instant, consumers, jobs, imports
troubles    the faults: kills, pauses, lost power, full disks, flipped bits, clocks that jump, two of a kind
layer       under the files of the processes: what is not synced can be lost
history     what each client was told, kept outside the broker
checker     nine invariants over a history
run         an episode from an empty folder to the verdict
"""
