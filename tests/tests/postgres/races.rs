//! Calls that meet.
