"""Reference cases of scan."""

from itm_utils.models import scan

NAMES = scan.SCAN.PUBLIC_NAMES
load = scan.SCAN.from_public
values = scan.public_values
