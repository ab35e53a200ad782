"""For all tests: hypothesis has no deadline, so that a busy machine does not fail a property."""

import hypothesis

hypothesis.settings.register_profile("slime", deadline=None)
hypothesis.settings.load_profile("slime")
