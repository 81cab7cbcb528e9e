#!/bin/bash
# Use the model as it would be used.
set -euo pipefail
python3 - "$1" <<'END'
import json, sys
a, b, c = json.load(open(sys.argv[1]))["weights"]
assert a + c > 0 > -a + c, "the model says the same of every point"
END
echo "$1 is good: accuracy $2"
