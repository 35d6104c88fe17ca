"""The settings of the compile cache, and what secure mode says of them."""

from tests.support.assembled import load_settings, start_violations

SECURE = {
    "SAGEMAKER_SECURE_MODE": "true",
    "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES",
    "SERVING_MODEL_STORE": "/nonexistent",
}


def test_secure_mode_refuses_compiled_code_from_elsewhere() -> None:
    """Who may write to LMI_CACHE_URI would decide what runs here; the text says no secret."""
    environ = SECURE | {"LMI_CACHE_URI": "s3://u:s3cret@bucket/caches"}
    (text,) = start_violations(load_settings(environ), environ, None)
    assert "LMI_CACHE_URI is not allowed in secure mode" in text
    assert "s3cret" not in text
    assert start_violations(load_settings(SECURE), SECURE, None) == ()
