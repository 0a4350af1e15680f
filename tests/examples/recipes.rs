//! The pages of docs/recipes that show parts of an example: their code is that of the example, and their commands
//! print what they show. tests/getting_started.sh follows the other pages.

use crate::documented::Example;

/// The page, the example that it shows, and its source.
const WEBSOCKET: (&str, &str) = (
    include_str!("../../docs/recipes/websocket_editor.md"),
    include_str!("../../examples/websocket.rs"),
);

#[test]
fn code_of_the_websocket_recipe_is_that_of_the_example() {
    let (page, source) = WEBSOCKET;
    let excerpts = blocks(page, "rust,ignore");
    assert!(!excerpts.is_empty());
    for excerpt in excerpts {
        assert!(source.contains(excerpt), "not in the example:\n{excerpt}");
    }
}

#[test]
fn the_curl_lines_of_the_websocket_recipe_answer_as_documented() {
    let (page, _) = WEBSOCKET;
    let example = Example::start("websocket", &[]);
    let commands = blocks(page, "sh");
    let commands = commands.iter().filter(|block| block.starts_with("curl "));
    let commands: Vec<&str> = commands.copied().collect();
    assert!(!commands.is_empty());
    for (command, answer) in commands.iter().zip(blocks(page, "text")) {
        example.answers(command, answer);
    }
}

/// The contents of the blocks of code in one language.
pub(crate) fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let behind = page.split(fence.as_str()).skip(1);
    behind
        .filter_map(|behind| Some(behind.split_once("```")?.0))
        .collect()
}
