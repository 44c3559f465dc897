"""Evidence on real data: small studies of the documents' claims, for docs/evidence.md.

    python -m benchmarks.evidence hsu2019           # run what is missing of a study
    python -m benchmarks.evidence --render          # tables and figures from the results

| file | what is there |
|---|---|
| studies.py | what is compared with what |
| cells.py | one run, and the line that stays of it |
| driver.py | many runs, in worker processes |
| store.py | the lines on disk |
| statistics.py | means, budgets, the choice by tuning |
| tables.py, page.py, curves.py | the page's tables, its markers, its figures |
"""
