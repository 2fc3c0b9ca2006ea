"""Flags of the Python that runs our programs, so that it imports nothing else from the user's folders or variables."""

import site

# Isolated mode also leaves out the site of the user, which is where `pip install --user` puts us.
ISOLATED = ("-E", "-P") if site.ENABLE_USER_SITE else ("-I",)
