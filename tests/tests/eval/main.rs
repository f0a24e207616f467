//! Real evaluators: sources of every kind, attributes that fail, limits, and what is left when one goes away.

mod attributes;
mod build;
mod hostile;
mod jobs;
mod large;
mod leaving;
mod limits;
mod private;
mod projects;
mod scene;
mod sources;
