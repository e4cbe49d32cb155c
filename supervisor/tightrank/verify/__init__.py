"""`tightrank verify`: after the plan and the start, the proof. Prompts of growing length against what runs, and its report.

    target -> ramp (pure) <- run (HTTP) -> store, report, plots        compare, parity: two reports, two sets of answers
"""
