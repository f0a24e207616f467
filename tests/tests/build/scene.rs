//! What tests with faults begin with: a farm whose only nodes are real builders, and builds that wait to be let on.

use std::collections::BTreeSet;
use std::sync::Arc;

use harmonia_nix::database::Database;
use harmonia_nix::{Sha256, store_path};
use harmonia_queue::janitor;
use harmonia_tests::eventually;
use harmonia_tests::nixes::{Expression, Nix, Version};
use harmonia_tests::press::{Press, RunningSigner, shared_nix};
use harmonia_tests::proxy::Proxy;
use harmonia_tests::s3::{S3, Server};
use harmonia_tests::yard::{Gates, RunningBuilder, substitutes};

/// A farm with a signer, whose uploads go by way of a proxy.
pub struct Scene {
    pub press: Press,
    pub signer: RunningSigner,
    /// Before the bucket, as the signer and the slots it gives see it.
    pub bucket: Proxy,
    _database: Proxy,
    pub gates: Gates,
}

impl Scene {
    pub async fn start() -> Scene {
        let press = Press::with(S3::start_public(Server::Versitygw).await).await;
        let (bucket, database) = (press.before_bucket(), press.before_database());
        let settings = press.settings_by(&bucket, &database).await;
        let signer = RunningSigner::start(&press.farm, settings).await;
        Scene { press, signer, bucket, _database: database, gates: Gates::new() }
    }

    /// A store whose builds see the gates.
    pub fn nix(&self, version: Version) -> Arc<Nix> {
        self.nix_with(version, "")
    }

    pub fn nix_with(&self, version: Version, more: &str) -> Arc<Nix> {
        let settings = format!("{}{}{more}", substitutes(&self.press), self.gates.setting());
        Arc::new(Nix::start_with(version, &settings))
    }

    /// A builder on such a store. The farm's own node, which builds nothing, goes: a retry would wait for it.
    pub async fn builder(&self, nix: &Arc<Nix>, name: &str) -> RunningBuilder {
        self.only_builders().await;
        RunningBuilder::start_on(&self.press, Arc::clone(nix), name, |settings| settings).await
    }

    pub async fn only_builders(&self) {
        let _ = self.press.session.deregister().await;
    }

    /// Wants these built; their derivations.
    pub async fn want(&self, expressions: &[&Expression]) -> Vec<String> {
        self.press.want(&self.signer, expressions).await
    }

    /// Waits until a build has come to its gate, and forgets that it did.
    pub async fn reached(&self, name: &str) {
        self.gates.arrived(name).await;
        self.gates.forget(name);
    }

    /// Waits until so many NARs are on their way to the bucket, or there.
    pub async fn sends_nars(&self, count: usize) {
        let sent =
            || self.bucket.requests().into_iter().filter(|request| is_nar(request)).collect::<BTreeSet<_>>();
        eventually("NARs are on their way", || async { sent().len() >= count }).await;
    }

    /// Waits until so many attempts have ended; how.
    pub async fn after_attempts(&self, drv: &str, count: usize) -> Vec<String> {
        eventually("attempts end", || async { self.press.outcomes(drv).await.len() >= count }).await;
        self.press.outcomes(drv).await
    }

    /// What waits for its next try is tried now.
    pub async fn hurry(&self) {
        self.press
            .farm
            .database
            .execute("UPDATE ci.blocked SET run_at = ci.clock() WHERE run_at IS NOT NULL")
            .await;
    }

    /// Every lease has ended, and the janitor has seen it. Its nodes are still heard of.
    pub async fn end_leases(&self) {
        self.past("ci.running", "lease_until").await;
        self.reap().await;
    }

    /// Nobody has heard of any node for longer than a lease, and the janitor has seen it.
    pub async fn nodes_died(&self) {
        self.past("ci.session", "last_seen").await;
        self.end_leases().await;
        self.hurry().await;
    }

    async fn past(&self, table: &str, column: &str) {
        let sql = format!("UPDATE {table} SET {column} = ci.clock() - interval '3 minutes'");
        self.press.farm.database.execute(&sql).await;
    }

    /// A janitor takes nothing back before it has led for as long as a lease.
    async fn reap(&self) {
        let lead = self.press.farm.lead().await;
        self.past("ci.leadership", "since").await;
        assert!(janitor::reap(&self.press.farm.operator, lead.generation).await.unwrap() > 0);
        self.press.farm.settle().await;
    }
}

/// Two outputs that differ whenever they are built, at a gate.
pub fn gated_pair(name: &str) -> Expression {
    let script = "mkdir $out $dev; head -c 32 /dev/urandom | od >$out/file; cp $out/file $dev/file; \
                  ln -s $out/file $dev/link";
    Gates::before(name, script).outputs(&["out", "dev"])
}

/// Whether a request puts a NAR into the bucket.
pub fn is_nar(request: &str) -> bool {
    request.starts_with("PUT /bucket/nar/")
}

/// Builds in a store whatever the cache has of it.
pub fn build_here(nix: &Nix, expression: &Expression) -> String {
    let drv = nix.instantiate(expression);
    nix.run("nix-store", &["--realise", "--option", "substitute", "false", &drv])
        .lines()
        .next()
        .unwrap()
        .to_owned()
}

/// The hash that a store has recorded for a path; none if it is not there.
pub fn local_hash(nix: &Nix, path: &str) -> Option<Sha256> {
    let path = store_path::parse(path).unwrap();
    Database::open(nix.database()).unwrap().hashes_of(std::slice::from_ref(&path)).unwrap().remove(&path)
}

/// The paths of an expression's outputs.
pub fn paths_of(expression: &Expression) -> Vec<String> {
    let nix = shared_nix();
    let drv = nix.instantiate(expression);
    nix.run("nix-store", &["--query", "--outputs", &drv]).lines().map(str::to_owned).collect()
}
