"""Reference cases of sgraf."""

from itm_utils.models import sgraf

NAMES = sgraf.SGRAF.PUBLIC_NAMES
load = sgraf.SGRAF.from_public
values = sgraf.public_values
