//! An evaluation as large as those of big repositories.

use harmonia_queue::evaluations::Stage;
use harmonia_tests::gateway::Gateway;
use harmonia_tests::nixes::Version;
use serde_json::Value;

use crate::scene::Scene;

const COUNT: i64 = 20_001;

#[tokio::test]
async fn twenty_thousand_derivations_are_evaluated_ingested_and_shown() {
    let scene = Scene::start(Version::Old).await;
    let frontend =
        Gateway::start_with(&scene.press, |settings| settings.with("anonymous_read", "true")).await;
    let name = |prefix: &str| format!("\"{prefix}${{toString i}}\"");
    scene.write(
        "default.nix",
        &format!(
            "builtins.listToAttrs (builtins.genList (i: {{ name = {}; value = make {}; }}) {COUNT})",
            name("attribute-"),
            name("large-")
        ),
    );
    let evaluation = scene.evaluate(scene.path(), &[]).await;
    assert_eq!((evaluation.stage, evaluation.error), (Stage::Complete, None));
    let get = async |path: String| {
        let url = format!("{}{path}", frontend.url.trim_end_matches("/cache"));
        reqwest::get(url).await.unwrap().error_for_status().unwrap().text().await.unwrap()
    };
    let detail: Value = serde_json::from_str(&get(format!("/api/evals/{}", evaluation.id)).await).unwrap();
    let builds = detail["builds"].as_object().unwrap().values().filter_map(Value::as_i64).sum::<i64>();
    assert_eq!((detail["attributes"].as_i64(), builds), (Some(COUNT), COUNT));
    let first = get(format!("/api/builds?evaluation={}", evaluation.id)).await;
    let first: Value = serde_json::from_str(&first).unwrap();
    assert_eq!(first["items"].as_array().map(Vec::len), Some(50));
    assert!(first["next"].is_string(), "there are more");
    let page = get(format!("/evals/{}", evaluation.id)).await;
    assert!(page.contains("20,001") && page.contains("attribute-0"), "{page}");
}
