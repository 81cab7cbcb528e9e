"""Run the cells of train.ipynb in order, in every worker, and stop at the first that fails.

    trnslurm submit ./run.py --nodes 2

Cells with IPython lines, such as %magic and !command, are not Python: leave them out.
"""

import json
from pathlib import Path

notebook = json.loads(Path(__file__).with_name("train.ipynb").read_text(encoding="utf-8"))
names = {"__name__": "__main__"}
for number, cell in enumerate(notebook["cells"], 1):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"<cell {number} of train.ipynb>", "exec"), names)
