"""Make failed assertions of the shipped contract show their values."""

import pytest

pytest.register_assert_rewrite("holdfast.backends.testing")
