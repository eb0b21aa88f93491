"""The soak: mixed work on a broker that is killed again and again, and a verdict on what clients were told.

history   what clients were told, kept outside the broker, and what must hold of it
crew      producers, cancels, consumers that come and go
run       a broker, its crew and its executioner, from start to verdict
"""
