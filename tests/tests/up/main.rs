//! Tests of a whole farm on one machine: `harmonia-ci up`, as a person starts it.

mod deaths;
mod doctor;
mod faults;
mod foreign;
mod life;
mod machine;
mod refusals;
mod verbs;
