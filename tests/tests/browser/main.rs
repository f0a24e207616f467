//! The web pages in a real Chromium, of a real farm on this machine.

mod chromium;
#[path = "../up/machine.rs"]
#[allow(dead_code)]
mod machine;
mod pages;
mod person;
mod stage;
