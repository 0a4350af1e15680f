//! The document of the example `openapi`.
//!
//! `openapi_3.1.json` is the schema of such documents, <https://spec.openapis.org/oas/3.1/schema/2022-10-07>, by the
//! OpenAPI Initiative. Its license is the Apache License 2.0, which `LICENSE-APACHE` has.

use jsonschema::Validator;
use serde_json::{Value, json};

use crate::documented::Example;

/// Also of its schemas, which the schema of documents leaves to their own dialect.
fn validator() -> Validator {
    let documents: Value = serde_json::from_str(include_str!("openapi_3.1.json")).unwrap();
    let dialect = "https://json-schema.org/draft/2020-12/schema";
    let all = json!({
        "$schema": dialect,
        "$ref": documents["$id"],
        "$defs": {
            "documents": documents,
            "schemas": { "$dynamicAnchor": "meta", "$ref": dialect },
        },
    });
    jsonschema::validator_for(&all).unwrap()
}

#[tokio::test]
async fn openapi_json_is_valid_and_lists_the_refusals_of_each_layer() {
    let example = Example::start("openapi", &[]);
    let response = support::http::request(example.addr, "GET", "/openapi.json", &[], b"").await;
    let document = response.json();
    let validator = validator();
    let errors: Vec<_> = validator
        .iter_errors(&document)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
    for (path, statuses) in [
        ("/orders/{id}/ship", "200 400 423 429 500 503"),
        ("/payments", "200 400 408 409 413 422 500 503"),
    ] {
        let responses = &document["paths"][path]["post"]["responses"];
        let listed = responses.as_object().unwrap().keys();
        let listed: Vec<&str> = listed.map(String::as_str).collect();
        assert_eq!(listed.join(" "), statuses, "{path}");
    }
    // What the validator must not accept: a schema that is none.
    let mut document = document;
    let content = "/paths/~1payments/post/responses/409/content/application~1problem+json";
    let kind = document.pointer_mut(&format!("{content}/schema/type"));
    *kind.unwrap() = json!("text");
    assert!(!validator.is_valid(&document));
}
