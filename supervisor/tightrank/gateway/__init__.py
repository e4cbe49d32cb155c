"""The gateway: what OpenAI clients talk to, in front of plain workers and of prefill/decode (P/D) pairs. A process of its own,
so that it can still say why when the guard has ended everything else.

One request:   intake -> handle (admit, pick) -> exchange (one leg, or both of a pair) -> app (reply)
Beside it:     supervisors, tripwire -> peers <- probe, canary, watchdog               (run.py builds them)

It never waits on a dead peer: a leg ends by its own socket, by its worker's generation ending (`supervisors`), or by the
`watchdog` when its engine makes no progress. What failed before the first byte is tried once more elsewhere.
"""
