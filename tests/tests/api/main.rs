//! The API over real HTTP, before a real PostgreSQL and a real S3 server, one module a concern.

mod auth;
mod bad_input;
mod builds;
mod desk;
mod evals;
mod events;
mod fuzz;
mod gitea;
mod github;
mod hostile;
mod log;
mod members;
mod pages;
mod people;
mod reader;
mod recorder;
mod sign_in;
mod sse;
mod statuses;
mod webhooks;
