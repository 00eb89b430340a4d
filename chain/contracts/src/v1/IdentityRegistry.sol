// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {AgentRole} from "./AgentRole.sol";

/// Allow-list of addresses that may hold tokens. One registry serves all tokens.
contract IdentityRegistry is AgentRole {
    mapping(address account => bool) private verified;

    event IdentityRegistered(address indexed account);
    event IdentityRemoved(address indexed account);

    function isVerified(address account) external view returns (bool) {
        return verified[account];
    }

    /// Idempotent: a repeat emits no event.
    function registerIdentity(address account) external onlyAgent {
        _register(account);
    }

    function batchRegisterIdentity(address[] calldata accounts) external onlyAgent {
        for (uint256 i = 0; i < accounts.length; ++i) _register(accounts[i]);
    }

    function deleteIdentity(address account) external onlyAgent {
        if (!verified[account]) return;
        verified[account] = false;
        emit IdentityRemoved(account);
    }

    function _register(address account) private {
        if (account == address(0)) revert ZeroAddress();
        if (verified[account]) return;
        verified[account] = true;
        emit IdentityRegistered(account);
    }
}
