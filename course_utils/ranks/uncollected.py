"""Imported first by the fork server: no garbage is collected while it imports what ranks need (private).

Nearly all that an import makes stays, and looking through it again and again takes a seventh of the time. `worker`,
which is imported last, collects once and switches the collector on again for the ranks.
"""

import gc

gc.disable()
