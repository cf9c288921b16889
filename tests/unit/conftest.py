"""Properties have no deadline. Other folders don't need hypothesis, so that tests/gpu runs on a machine without it."""

import hypothesis

hypothesis.settings.register_profile("no deadline", deadline=None)  # how long an example takes is the machine's matter
hypothesis.settings.load_profile("no deadline")
