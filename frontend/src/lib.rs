//! The frontend: for now, the cache gateway.
