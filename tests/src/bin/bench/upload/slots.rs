//! Slots, each of which needs a HEAD, against HEADs.

use std::time::Instant;

use futures::stream::{self, StreamExt};
use harmonia_builder::upload::http_client;
use harmonia_nix::Sha256;
use harmonia_service::protocol::{Bytes, Slot, SlotsAnswer, SlotsRequest, Wish};

use super::ROUNDS;
use super::goods::Goods;
use super::stage::Stage;
use crate::measure::median;

/// Wishes of one request.
const BATCH: usize = 50;
/// Requests at once, as an uploader makes them.
const IN_FLIGHT: usize = 4;
/// HEADs that a signer makes at once for one request.
const AT_ONCE: usize = 32;
const BATCHES: usize = 100;

/// Slots a second over HEADs a second.
pub async fn against_heads(goods: &Goods) -> f64 {
    let stage = Stage::set(goods).await;
    let mut ratios = vec![];
    for round in 0..=ROUNDS {
        let heads = heads(&stage).await;
        let slots = slots(&stage).await;
        eprintln!("   {heads:.0} HEADs/s, {slots:.0} slots/s");
        if round > 0 {
            ratios.push(slots / heads);
        }
    }
    median(ratios)
}

/// Of keys under which nothing is, as a signer finds it.
async fn heads(stage: &Stage<'_>) -> f64 {
    let (client, bucket) = (stage.press.s3.client(), &stage.press.s3.bucket);
    let start = Instant::now();
    let missing = stream::iter(0..BATCHES * BATCH).map(|_| {
        let key = format!("nar/{}.nar.zst", random().nix32());
        let head = client.head_object().bucket(bucket).key(key).send();
        async { head.await.is_err_and(|error| error.into_service_error().is_not_found()) }
    });
    let missing = missing.buffer_unordered(IN_FLIGHT * AT_ONCE).filter(|&missing| async move { missing });
    assert_eq!(missing.count().await, BATCHES * BATCH, "a HEAD failed");
    (BATCHES * BATCH) as f64 / start.elapsed().as_secs_f64()
}

/// For NARs that the bucket does not have, of as many jobs as a batch has wishes.
async fn slots(stage: &Stage<'_>) -> f64 {
    let (http, url) = (http_client().expect("a client"), format!("{}/api/upload-slots", stage.signer_url));
    let token = stage.token();
    let start = Instant::now();
    let given = stream::iter(0..BATCHES).map(|batch| {
        let wishes = stage.claims.iter().cycle().skip(batch * BATCH % stage.claims.len()).take(BATCH);
        let wishes = wishes.map(|(claim, path)| Wish::Nar {
            claim: *claim,
            path: path.to_string(),
            nar_hash: random(),
            file: Bytes { size: 10_000, sha256: random() },
        });
        let request = http.post(&url).bearer_auth(&token).json(&SlotsRequest { wishes: wishes.collect() });
        async {
            let answer: SlotsAnswer = request.send().await.expect("an answer").json().await.expect("slots");
            answer.slots.iter().filter(|slot| matches!(slot, Slot::Put { .. })).count()
        }
    });
    let given: usize = given.buffer_unordered(IN_FLIGHT).fold(0, async |sum, count| sum + count).await;
    assert_eq!(given, BATCHES * BATCH, "a slot was not given");
    given as f64 / start.elapsed().as_secs_f64()
}

fn random() -> Sha256 {
    Sha256(rand::random())
}
