"""Certificates for connections that are encrypted."""

import ssl

import pytest
import trustme


@pytest.fixture(scope="session")
def certificates() -> dict[str, ssl.SSLContext]:
    """Contexts of a server and a client that each ask for the other's certificate, and a client without one."""
    authority = trustme.CA()
    contexts = {
        "server": ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        "client": ssl.create_default_context(ssl.Purpose.SERVER_AUTH),
        "stranger": ssl.create_default_context(ssl.Purpose.SERVER_AUTH),
    }
    for context in contexts.values():
        authority.configure_trust(context)
    contexts["server"].verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(contexts["server"])
    authority.issue_cert("host@example.org").configure_cert(contexts["client"])
    return contexts
