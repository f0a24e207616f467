//! A builder with nothing to do.

use std::time::Duration;

use harmonia_tests::nixes::{Nix, Version};
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard;

use crate::baseline::press;
use crate::measure::cpu_of_process;
use crate::upload::child::Child;

const WATCHED: Duration = Duration::from_secs(60);

/// Percent of a core.
pub async fn core_percent() -> f64 {
    let press = press(S3::start_public(Server::InProcess).await).await;
    let nix = Nix::start_with(Version::New, &yard::substitutes(&press));
    let state = tempfile::tempdir().expect("a directory");
    let builder = Child::start("builder", &yard::settings(&press, &nix, "idle", state.path()));
    let admin = press.farm.database.admin();
    harmonia_tests::eventually("the builder registers", || async {
        let found = sqlx::query_scalar::<_, bool>("SELECT EXISTS (SELECT FROM ci.node WHERE name = 'idle')");
        found.fetch_one(&admin).await.expect("an answer")
    })
    .await;
    let before = cpu_of_process(builder.id());
    tokio::time::sleep(WATCHED).await;
    100.0 * (cpu_of_process(builder.id()) - before) / WATCHED.as_secs_f64()
}
