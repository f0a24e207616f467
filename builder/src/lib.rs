//! The builder: for now, how an output gets into the bucket.

pub mod upload;
