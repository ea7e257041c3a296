"""All that runs, records, judges and publishes the book. Chapters build models from :mod:`itm_utils` alone."""

import sys
from typing import Any, cast

# jsonschema (receipts, nbformat, papermill) checks international addresses with this package if it is installed, which
# builds 38 grammars on import: 1.7 s in each of the three processes of a run, and no schema here has such an address.
cast(Any, sys.modules).setdefault("rfc3987_syntax", None)
