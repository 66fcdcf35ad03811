"""Certificates for connections that are encrypted, and for some that can't be."""

import datetime
import ssl

import pytest
import trustme

YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


@pytest.fixture(scope="session")
def certificates() -> dict[str, ssl.SSLContext]:
    """Contexts by what is theirs.

    server, client                    good ones; each asks for the other's certificate
    without                           a client that has no certificate
    other client, other server        with a certificate of an authority that nobody here trusts
    misnamed server, expired server   with one for another name, and with one that was good until yesterday
    """
    authority, other = trustme.CA(), trustme.CA()
    issued = {
        "client": authority.issue_cert("host@example.org"),
        "without": None,
        "other client": other.issue_cert("host@example.org"),
        "server": authority.issue_cert("127.0.0.1"),
        "other server": other.issue_cert("127.0.0.1"),
        "misnamed server": authority.issue_cert("127.0.0.2"),
        "expired server": authority.issue_cert("127.0.0.1", not_after=YESTERDAY),
    }
    contexts = {}
    for name, certificate in issued.items():
        is_server = name.endswith("server")
        purpose = ssl.Purpose.CLIENT_AUTH if is_server else ssl.Purpose.SERVER_AUTH
        contexts[name] = context = ssl.create_default_context(purpose)
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        if certificate is not None:
            certificate.configure_cert(context)
    return contexts
