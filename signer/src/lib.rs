//! The signer: how a result is published.
